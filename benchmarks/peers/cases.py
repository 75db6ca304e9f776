"""What is measured: decode of some batches at some context, and prefill."""

import random
from dataclasses import dataclass

_CHUNK = 256  #: prompt tokens in a step of the engine that takes the fewest of them
PREFILL_TOKENS = 1024


@dataclass(frozen=True)
class Case:
    """``batch`` prompts of ``context`` random tokens each, ``new_tokens`` generated for each: one to measure prefill."""

    batch: int
    context: int
    new_tokens: int

    @property
    def is_prefill(self) -> bool:
        return self.new_tokens == 1

    @property
    def name(self) -> str:
        return f"prefill {self.context}" if self.is_prefill else f"decode {self.batch} x {self.context}"

    def prompts(self, number: int, attempt: int) -> list[list[int]]:
        """Equal for all peers, new in every round and attempt: an engine may keep what it computed for a prompt it has seen."""
        rng = random.Random(f"{number} {attempt} {self.name}")
        return [[rng.randrange(100, 20_000) for _ in range(self.context)] for _ in range(self.batch)]


def make_cases(tokens: int) -> list[Case]:
    """``tokens`` decode steps of each batch, and one more for each prompt chunk: engines may decode the first sequences while they
    compute the prompts of the last, and such steps do not count (see ``protocol``)."""
    shapes = [(batch, 64) for batch in (1, 4, 8, 16, 32)] + [(batch, 1024) for batch in (1, 8)]
    decode = [Case(batch, context, tokens + -(-batch * context // _CHUNK)) for batch, context in shapes]
    return [*decode, Case(1, PREFILL_TOKENS, 1)]
