"""The jobs that clients submit: a catalogue of cases, each with the answer that an uninterrupted run gave it.

A job's tokens depend on the job alone, so one reference serves every run of a case, whoever shares its batch and whatever dies.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

_WORDS = """
    server sentence token page engine log truth cache kill restart stream client cursor commit fence pool crash resume quiet
    river Zwölf Boxkämpfer naïve façade 東京 emoji 🙂 over under between before after never always seven eleven hundred
""".split()  # noqa: SIM905
POISON_TOKEN = 509  #: no prompt of the catalogue begins with it
_COMMON_PREFIX = 96  #: token ids that some prompts share, so that pages are found by identity and not only by owner
_BOUND = 2  #: cases whose text must be JSON
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 8, "maxLength": 10},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "minItems": 2, "maxItems": 4},
        "age": {"type": "integer", "minimum": 100, "maximum": 9999},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of job: a body for ``POST /v1/jobs`` that has exactly one right answer."""

    name: str
    body: dict[str, Any]

    @property
    def max_tokens(self) -> int:
        return int(self.body["max_tokens"])


@dataclass(frozen=True, slots=True)
class Answer:
    """What an uninterrupted run made of a case."""

    status: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Size:
    """Lengths in tokens, to suit the speed of a model."""

    short: tuple[int, int]
    long: tuple[int, int]
    prompt: tuple[int, int]


#: A step of the tiny model takes a few milliseconds: its jobs must be long, or every kill would find them finished.
TINY = Size(short=(20, 60), long=(180, 320), prompt=(3, 110))
DEMO = Size(short=(8, 24), long=(60, 120), prompt=(3, 110))


@dataclass(slots=True)
class Catalogue:
    cases: dict[str, Case] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)

    def add(self, case: Case, answer: Answer) -> None:
        self.cases[case.name] = case
        self.answers[case.name] = answer

    def shortest(self, count: int) -> list[Case]:
        """Those whose text must be JSON, and of the others the shortest: for a kill at every token."""
        ordered = sorted(
            self.cases.values(), key=lambda case: ("response_format" not in case.body, len(self.answers[case.name].token_ids))
        )
        return ordered[:count]

    def longest(self, count: int) -> list[Case]:
        """The cases that run longest: for scenarios in which no job may end before the fault."""
        ordered = sorted(self.cases.values(), key=lambda case: -len(self.answers[case.name].token_ids))
        return ordered[:count]


def make_cases(rng: Random, size: Size, count: int) -> list[Case]:
    """``count`` cases: long and short, greedy and seeded, text and token ids, with penalties, with and without the end of text."""
    common = [rng.randrange(3, 500) for _ in range(_COMMON_PREFIX)]
    return [_case(rng, size, number, common) for number in range(count)]


def _case(rng: Random, size: Size, number: int, common: Sequence[int]) -> Case:
    long = number % 3 != 2
    body: dict[str, Any] = {"max_tokens": rng.randint(*(size.long if long else size.short)), "ignore_eos": number % 5 != 4}
    length = rng.randint(*size.prompt)
    if number % 4 == 0:
        body["prompt"] = " ".join(rng.choice(_WORDS) for _ in range(max(2, length // 6)))
    elif number % 4 == 1:
        body["prompt"] = [*common, *(rng.randrange(3, 500) for _ in range(1 + length // 8))]
    else:
        body["prompt"] = [rng.randrange(3, 500) for _ in range(length)]
    if number % 2:
        body |= {"temperature": rng.choice([0.6, 0.9, 1.2]), "seed": rng.randrange(1 << 40), "top_p": rng.choice([0.8, 0.95, 1.0])}
        if number % 3 == 0:
            body |= {"presence_penalty": 0.5, "repetition_penalty": 1.1, "top_k": 50}
    else:
        body["temperature"] = 0
    kind = "seeded" if number % 2 else "greedy"
    return Case(f"{number:02d}-{kind}-{'long' if long else 'short'}", body)


def with_stop(case: Case, answer: Answer, rng: Random) -> Case | None:
    """The same case with a stop string that its answer really reaches, well into the text. None when it has no plain text there."""
    text = answer.text
    begin = len(text) // 2
    places = [at for at in range(begin, len(text) - 4) if "�" not in text[at : at + 4] and text.find(text[at : at + 4]) == at]
    if not places:
        return None
    at = rng.choice(places)
    return replace(case, name=case.name + "-stop", body={**case.body, "stop": [text[at : at + 4]]})


def make_bound_case(rng: Random, number: int) -> Case:
    """A case whose text must be JSON of some 40 tokens."""
    body: dict[str, Any] = {
        "prompt": " ".join(rng.choice(_WORDS) for _ in range(6)),
        "max_tokens": 100,
        "temperature": rng.choice([0.6, 0.9]),
        "seed": rng.randrange(1 << 40),
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}},
    }
    return Case(f"{number:02d}-json", body)


def make_catalogue(rng: Random, size: Size, count: int, run: Callable[[list[Case]], list[Answer]]) -> Catalogue:
    """``run`` answers cases without any fault."""
    catalogue = Catalogue()
    cases = make_cases(rng, size, count)
    for case, answer in zip(cases, run(cases), strict=True):
        catalogue.add(case, answer)
    chosen = rng.sample(cases, k=max(1, count // 5))
    stopped = [stop for case in chosen if (stop := with_stop(case, catalogue.answers[case.name], rng)) is not None]
    for case, answer in zip(stopped, run(stopped), strict=True):
        catalogue.add(case, answer)
    bound = [make_bound_case(rng, number) for number in range(_BOUND)]
    for case, answer in zip(bound, run(bound), strict=True):
        json.loads(answer.text)  # every answer is held against this one, so all of them are JSON when it is
        catalogue.add(case, answer)
    return catalogue
