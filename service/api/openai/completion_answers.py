"""Completions as OpenAI's clients see them, whole and streamed."""

from collections.abc import Sequence
from typing import Any

from service.api import logprobs
from service.api.context import ServedModel
from service.api.openai.choices import Json, check_endings, openai_usage
from service.api.openai.surface import Output
from service.api.views import asked_logprobs
from storage.job_spec import JobSpec
from storage.records import JobRecord, LogEntry


class CompletionShape:
    """The parts that whole and streamed answers are made of."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def whole(self, outputs: Sequence[Output]) -> Json:
        check_endings(outputs)
        records = [output.record for output in outputs]
        choices = [self._whole_choice(index, output) for index, output in enumerate(outputs)]
        return {**self.chunk(records[0].job_id, records[0], choices), "usage": self.usage(records, choices)}

    def _whole_choice(self, index: int, output: Output) -> Json:
        shown = self.shown(output.entries, 0) if asked_logprobs(output.record) else None
        return _choice(index, _echoed(output.record) + output.text, shown, output.record.finish_reason)

    def shown(self, entries: Sequence[LogEntry], text_before: int) -> Json | None:
        """Log probabilities."""
        return logprobs.legacy(entries, text_before, self._model.tokenization) if entries else None

    def choice(self, index: int, record: JobRecord) -> "_StreamedText":
        return _StreamedText(self, index, _echoed(record), asked_logprobs(record))

    def chunk(self, answer_id: str, record: JobRecord, choices: list[Json]) -> Json:
        return {
            "id": answer_id,
            "object": "text_completion",
            "created": int(record.created_at),
            "model": self._model.name,
            "choices": choices,
        }

    def usage(self, records: Sequence[JobRecord], choices: Sequence[Any]) -> Json:
        by_prompt: dict[int, list[JobRecord]] = {}
        for record in records:
            by_prompt.setdefault(JobSpec.from_json(record.spec).request.get("prompt", 0), []).append(record)
        return openai_usage(*by_prompt.values())


def _choice(index: int, text: str, shown: Json | None, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": shown, "finish_reason": finish_reason}


def _echoed(record: JobRecord) -> str:
    """The prompt's text, where the answer is to begin with it."""
    text: str = JobSpec.from_json(record.spec).request.get("echo", "")
    return text


class _StreamedText:
    """A chunk for a prompt that is echoed, one for each token that shows text, and one for the end."""

    def __init__(self, shape: CompletionShape, index: int, echoed: str, with_logprobs: bool) -> None:
        self._shape = shape
        self._index = index
        self._echoed = echoed
        self._with_logprobs = with_logprobs
        self._length = 0  #: characters so far

    def begin(self) -> list[Json]:
        return [_choice(self._index, self._echoed, None, None)] if self._echoed else []

    def add(self, entry: LogEntry) -> list[Json]:
        shown = self._shape.shown([entry], self._length) if self._with_logprobs else None
        self._length += len(entry.text)
        return [_choice(self._index, entry.text, shown, None)] if entry.text or shown else []

    def end(self, record: JobRecord) -> list[Json]:
        return [_choice(self._index, "", None, record.finish_reason)]
