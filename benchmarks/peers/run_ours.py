"""Our engine alone, as in ``benchmarks.bare_engine``: model folder, threads, form of the weights. Default pages and settings."""

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.bare_engine import PAGES
from benchmarks.harness import Subject, make_budget, make_job
from benchmarks.peers.protocol import Message, Prompts, serve, timed
from engine.model import load_model


def load() -> tuple[Callable[[Message], Message], Message]:
    folder, threads, weights = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    subject = Subject(load_model(folder, threads=threads, weights=weights), Tokenizer.from_file(str(folder / "tokenizer.json")))
    engine = subject.engine(subject.residency(subject.pool(PAGES)), make_budget())

    def generate(prompts: Prompts, new_tokens: int) -> Iterator[Sequence[int]]:
        jobs = [make_job(order, prompt, new_tokens) for order, prompt in enumerate(prompts)]
        counts = [0] * len(jobs)
        yield counts
        for job in jobs:
            engine.add(job)
        while engine.has_work:
            for output in engine.step().outputs:
                counts[int(output.sequence_id)] = output.index + 1
            yield counts

    return timed(generate), {"version": f"midsentence {version('midsentence')}, torch {version('torch')}"}


if __name__ == "__main__":
    serve(load)
