"""A job's tokens as the parts of an answer: how its text is read is stored with it, so every reader reads the same."""

import hashlib
from typing import Any

from service.api.openai.dialects import DIALECTS, THINK, THOUGHT
from service.api.openai.parts import Call, Delta, Expected, Parser
from service.tokenization import Tokenization
from storage.job_spec import JobSpec
from storage.records import JobRecord, LogEntry


def expected_to_json(expected: Expected) -> dict[str, Any]:
    """For ``JobSpec.request["parts"]``: how a text is read never changes with a later template of the model."""
    return {
        "dialect": expected.dialect.name if expected.dialect is not None else None,
        "tools": sorted(expected.tools),
        "max_calls": expected.max_calls,
        "reasons": expected.reasons,
        "thinking": expected.thinking,
    }


def expected_of(record: JobRecord) -> Expected:
    stored = JobSpec.from_json(record.spec).request.get("parts")
    if stored is None:  # a response of the first versions: a text and nothing else
        return Expected()
    dialect = DIALECTS[stored["dialect"]] if stored["dialect"] is not None else None
    return Expected(**{**stored, "dialect": dialect, "tools": frozenset(stored["tools"])})


def call_id(job_id: str, index: int) -> str:
    """Nine letters and digits: Mistral's templates take no others, and all others take these."""
    return hashlib.blake2b(f"{job_id} {index}".encode()).hexdigest()[:9]


class Reading:
    """A job's tokens as parts of a message. Where a word of the model's is a special token, the text lacks it, the token tells."""

    def __init__(self, record: JobRecord, tokenization: Tokenization) -> None:
        expected = expected_of(record)
        self.only_content = expected.dialect is None and not expected.reasons  #: it can be nothing else
        words = expected.dialect.words if expected.dialect is not None else ()
        self._words = frozenset((*words, THINK, THOUGHT) if expected.reasons else words)
        self._parser = Parser(expected)
        self._tokenization = tokenization
        self._calls = False
        self.reasoning_tokens = 0

    def add(self, entry: LogEntry) -> list[Delta]:
        word = self._tokenization.hidden_text(entry.token)
        deltas = self._noted(self._parser.push((word if word in self._words else "") + entry.text))
        self.reasoning_tokens += self._parser.reasoning
        return deltas

    def finish(self) -> list[Delta]:
        return self._noted(self._parser.finish())

    def _noted(self, deltas: list[Delta]) -> list[Delta]:
        self._calls = self._calls or any(isinstance(delta, Call) for delta in deltas)
        return deltas

    def finish_reason(self, record: JobRecord) -> str:
        return "tool_calls" if self._calls and record.finish_reason == "stop" else record.finish_reason
