"""Hugging Face transformers: model folder, threads. Eager fp32 with torch's attention and its growing cache.

The loop is that of ``generate`` without its overhead, which flatters the peer.
"""

import sys
from collections.abc import Callable, Iterator, Sequence

import torch
import transformers

from benchmarks.peers.protocol import Message, Prompts, serve, timed


def load() -> tuple[Callable[[Message], Message], Message]:
    folder, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    ).eval()

    @torch.inference_mode()
    def generate(prompts: Prompts, new_tokens: int) -> Iterator[Sequence[int]]:
        batch = len(prompts)
        cache, ids = transformers.DynamicCache(config=model.config), torch.tensor(prompts)
        yield [0] * batch
        for count in range(1, new_tokens + 1):
            output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = output.logits[:, -1].argmax(-1, keepdim=True)
            ids.tolist()  # the caller of ``generate`` gets tokens
            yield [count] * batch

    return timed(generate), {"version": f"transformers {transformers.__version__}, torch {torch.__version__}"}


if __name__ == "__main__":
    serve(load)
