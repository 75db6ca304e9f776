"""Chat completions as OpenAI's clients see them, whole and streamed; reasoning where vLLM's and DeepSeek's clients look for it."""

from collections.abc import Sequence
from typing import Any

from service.api import logprobs, views
from service.api.context import ServedModel
from service.api.openai.choices import Json, check_endings, openai_usage
from service.api.openai.parts import Arguments, Call, Content, Delta, Reasoning, joined
from service.api.openai.readings import Reading, call_id
from service.api.openai.surface import Output
from storage.job_spec import JobSpec
from storage.records import JobRecord, LogEntry


class ChatShape:
    """The parts that whole and streamed answers are made of."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def whole(self, outputs: Sequence[Output]) -> Json:
        check_endings(outputs)
        records = [output.record for output in outputs]
        readings = [Reading(record, self._model.tokenization) for record in records]
        choices = [self._whole_choice(*numbered) for numbered in zip(range(len(outputs)), outputs, readings, strict=True)]
        body = self._body("chat.completion", records[0].job_id, records[0], choices)
        spec = JobSpec.from_json(records[0].spec)
        metadata = {"metadata": views.metadata(records[0])} if spec.request.get("store") else {}
        return {**body, "usage": self.usage(records, readings), **metadata}

    def _whole_choice(self, index: int, output: Output, reading: Reading) -> Json:
        parts = joined([delta for entry in output.entries for delta in reading.add(entry)] + reading.finish())
        message: Json = {
            "role": "assistant",
            "content": None if parts.calls and not parts.content else parts.content,
            "refusal": None,
        }
        if parts.reasoning:
            message["reasoning_content"] = parts.reasoning
        if parts.calls:
            message["tool_calls"] = [
                {"id": call_id(output.record.job_id, i), "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(parts.calls)
            ]
        shown = self.shown(output.entries) if views.asked_logprobs(output.record) else None
        return {"index": index, "message": message, "logprobs": shown, "finish_reason": reading.finish_reason(output.record)}

    def shown(self, entries: Sequence[LogEntry]) -> Json:
        return {"content": logprobs.chat(entries, self._model.tokenization), "refusal": None}

    def choice(self, index: int, record: JobRecord) -> "_StreamedMessage":
        return _StreamedMessage(self, index, record, Reading(record, self._model.tokenization))

    def chunk(self, answer_id: str, record: JobRecord, choices: list[Json]) -> Json:
        return self._body("chat.completion.chunk", answer_id, record, choices)

    def _body(self, kind: str, answer_id: str, record: JobRecord, choices: list[Json]) -> Json:
        return {
            "id": answer_id,
            "object": kind,
            "created": int(record.created_at),
            "model": self._model.name,
            "choices": choices,
            "service_tier": "default",
            "system_fingerprint": f"fp_{record.model_fingerprint[:10]}",
        }

    def usage(self, records: Sequence[JobRecord], choices: Sequence[Any]) -> Json:
        reasoning = sum(choice.reasoning_tokens for choice in choices)
        return {**openai_usage(records), "completion_tokens_details": {"reasoning_tokens": reasoning}}


class _StreamedMessage:
    def __init__(self, shape: ChatShape, index: int, record: JobRecord, reading: Reading) -> None:
        self._shape = shape
        self._index = index
        self._job_id = record.job_id
        self._with_logprobs = views.asked_logprobs(record)
        self._reading = reading

    @property
    def reasoning_tokens(self) -> int:
        return self._reading.reasoning_tokens

    def begin(self) -> list[Json]:
        return [self._piece({"role": "assistant", "content": "", "refusal": None})]

    def add(self, entry: LogEntry) -> list[Json]:
        pieces = [self._piece(self._told(delta)) for delta in self._reading.add(entry)]
        if self._with_logprobs:
            pieces = pieces or [self._piece({})]
            pieces[0]["logprobs"] = self._shape.shown([entry])
        return pieces

    def end(self, record: JobRecord) -> list[Json]:
        pieces = [self._piece(self._told(delta)) for delta in self._reading.finish()]
        return [*pieces, self._piece({}, self._reading.finish_reason(record))]

    def _piece(self, delta: Json, finish_reason: str | None = None) -> Json:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def _told(self, delta: Delta) -> Json:
        match delta:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case Call(index, name):
                function = {"name": name, "arguments": ""}
                return {
                    "tool_calls": [{"index": index, "id": call_id(self._job_id, index), "type": "function", "function": function}]
                }
            case Arguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
