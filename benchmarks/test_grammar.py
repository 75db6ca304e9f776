"""What a grammar costs: the same jobs with one and without, by batch.

All jobs are greedy, of 64 prompt and 64 generated tokens. With the grammar they are JSON that does not end within these: texts,
whose masks allow nearly everything, and structure, whose masks allow nearly nothing. Tokens differ, the model's work does not.
"""

from dataclasses import replace

import pytest
from llguidance import LLMatcher
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.harness import Subject, describe, in_turns, make_jobs, paged, pages_needed

BATCHES = (1, 8, 32)
PROMPT, OUTPUT = 64, 64  #: tokens
ROUNDS, QUICK_ROUNDS = 5, 1
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 24}, "size": {"type": "number"}, "kind": {"enum": ["new", "old"]}},
        "required": ["name", "size", "kind"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("batch", BATCHES)
def test_grammar(benchmark: BenchmarkFixture, subject: Subject, quick: bool, batch: int) -> None:
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
    plain = make_jobs(subject, [(PROMPT, OUTPUT)] * batch)
    bound = [replace(job, grammar=grammar) for job in plain]
    needed = sum(map(pages_needed, plain))
    runs = in_turns(
        benchmark, paged(subject, bound, needed), {"none": paged(subject, plain, needed)}, QUICK_ROUNDS if quick else ROUNDS
    )
    assert all(run.num_tokens == batch * OUTPUT for each in runs.values() for run in each)
    texts = [subject.tokenizer.decode(tokens) for tokens in runs["ours"][0].tokens.values()]
    assert all(text.startswith('[{"name":"') for text in texts)
    benchmark.extra_info |= {name: describe(each) for name, each in runs.items()}
