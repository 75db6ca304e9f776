"""Responses as OpenAI's clients see them: pure functions of what is stored, so that every reader sees the same, at any time."""

import functools
from collections.abc import Sequence
from typing import Any

from service.api import logprobs, views
from service.api.context import ServedModel
from service.api.openai.parts import Expected
from service.api.openai.readings import expected_to_json
from service.api.openai.response_items import Item
from service.api.openai.response_output import ResponseOutput
from service.api.openai.response_requests import ResponseRequest
from storage.job_spec import JobSpec
from storage.records import JobRecord, JobStatus, LogEntry

#: Fields of the request that are given back as they came.
_ECHOED = (
    "background", "instructions", "max_output_tokens", "max_tool_calls", "parallel_tool_calls", "previous_response_id",
    "prompt_cache_key", "prompt_cache_retention", "reasoning", "safety_identifier", "store", "text", "tool_choice", "tools",
    "top_logprobs", "truncation", "user",
)  # fmt: skip


def kept(asked: ResponseRequest, items: list[Item], expected: Expected) -> dict[str, Any]:
    """``JobSpec.request`` of a response."""
    echo = asked.model_dump(include=set(_ECHOED))
    echo["text"]["format"] = asked.text.format.model_dump(by_alias=True, exclude_none=True)
    return {"items": items, "echo": echo, "parts": expected_to_json(expected)}


class ResponseShape:
    """What whole and streamed responses have in common. ``entries`` are always all tokens there are."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def whole(self, record: JobRecord, entries: Sequence[LogEntry]) -> dict[str, Any]:
        """The response as it is now."""
        output = self.output(record)
        if entries or record.status.terminal:
            output.begin()
        for entry in entries:
            output.add(entry)
        if record.status.terminal:
            output.end(record.status)
        return self.told(record, output)

    def told(self, record: JobRecord, output: ResponseOutput) -> dict[str, Any]:
        """The same, where its tokens were read already."""
        return {
            **_head(record, JobSpec.from_json(record.spec), record.status),
            "completed_at": _completed_at(record),
            "error": _error(record),
            "incomplete_details": _incomplete_details(record),
            "output": output.items,
            "usage": _usage(record, output.reasoning_tokens) if record.status.terminal else None,
            "recovery": views.recovery(record),
        }

    def opening(self, record: JobRecord, status: JobStatus) -> dict[str, Any]:
        """The response before its first token, of which nothing is known but what was asked for."""
        return {
            **_head(record, JobSpec.from_json(record.spec), status),
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            "recovery": None,
        }

    def output(self, record: JobRecord) -> ResponseOutput:
        """Nothing yet."""
        shown = functools.partial(logprobs.chat, tokenization=self._model.tokenization)
        return ResponseOutput(record, self._model.tokenization, shown if views.asked_logprobs(record) else lambda entries: [])


def _head(record: JobRecord, spec: JobSpec, status: JobStatus) -> dict[str, Any]:
    """All that is fixed when the response is created, and the status."""
    return {
        "id": record.job_id,
        "object": "response",
        "created_at": int(record.created_at),
        "status": status.value,
        "model": spec.model,
        "tools": [],  # of the first versions, which had none to echo
        **spec.request["echo"],
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "seed": spec.seed,  # ours: the one given, or the one that was drawn
        "metadata": spec.metadata,
        "service_tier": "default",
        "conversation": None,
        "prompt": None,
    }


def _completed_at(record: JobRecord) -> int | None:
    return int(record.finished_at) if record.status is JobStatus.COMPLETED and record.finished_at is not None else None


def _error(record: JobRecord) -> dict[str, str] | None:
    """OpenAI's codes are a closed list, of which one fits: ours goes before the message."""
    error = record.error
    return {"code": "server_error", "message": f"{error.code}: {error.message}"} if error is not None else None


def _incomplete_details(record: JobRecord) -> dict[str, str] | None:
    return {"reason": "max_output_tokens"} if record.status is JobStatus.INCOMPLETE else None


def _usage(record: JobRecord, reasoning_tokens: int) -> dict[str, Any]:
    prompt, output = len(record.prompt_token_ids), record.log_length
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": record.cached_tokens},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prompt + output,
    }
