"""The engine alone in a process: no Redis, no pool file, no HTTP. Work comes as JSON lines on stdin, times go out on stdout."""

import json
import sys
import time

from tokenizers import Tokenizer

from engine import model_source
from engine.assembly import make_residency
from engine.core import Engine
from engine.model import load_model
from engine.pools import DevicePool
from engine.runner import ModelRunner
from engine.sampler import SamplingParams
from engine.scheduler import Budget
from engine.sequence import Request
from engine.threads import default_threads

PAGE_SIZE, CHUNK, PAGES = 16, 256, 1024


def make_engine(model_name: str) -> Engine:
    folder = model_source.resolve(model_name)
    model = load_model(folder, threads=default_threads())
    device = DevicePool(PAGES, model.geometry(PAGE_SIZE))
    return Engine(
        ModelRunner(model, device.tensor, PAGE_SIZE, CHUNK),
        make_residency(device, prefill_chunk=CHUNK),
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        Budget(max_running=32, max_step_rows=64, max_step_tokens=512, prefill_chunk=CHUNK),
        max_context=model.max_context,
        eos_token_ids=frozenset(model.eos_token_ids),
    )


def run_round(engine: Engine, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds from the first request to the last token, and every job's tokens."""
    greedy = SamplingParams(temperature=0.0, seed=0)
    tokens: dict[str, list[int]] = {}
    began = time.perf_counter()
    for index, prompt in enumerate(prompts):
        tokens[str(index)] = []
        engine.add(Request(str(index), tuple(prompt), greedy, max_tokens, ignore_eos=True, order=index))
    while engine.has_work:
        for output in engine.step().outputs:
            tokens[output.sequence_id].append(output.token)
    return time.perf_counter() - began, list(tokens.values())


def main() -> None:
    engine = make_engine(sys.argv[1])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        seconds, tokens = run_round(engine, work["prompts"], work["max_tokens"])
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
