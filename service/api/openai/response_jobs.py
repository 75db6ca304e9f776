"""From a request for a response to its job, and how long that job lives."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from service.api import submission, views
from service.api.context import Context
from service.api.openai import response_items
from service.api.openai.answer_grammar import answer_grammar
from service.api.openai.canceller import Canceller
from service.api.openai.response_answers import ResponseShape, kept
from service.api.openai.response_requests import MAX_ITEMS, ResponseRequest
from service.api.openai.surface import RequestJobs
from service.api.openai.template import ChatTemplate
from service.api.problems import InvalidRequest, JobNotFound
from service.api.schemas import validate
from storage.job_spec import JobSpec
from storage.job_store import JobStore
from storage.records import JobRecord, LogEntry, NewJob

KIND = "response"
_Read = tuple[JobRecord, list[LogEntry]]


def read_response(store: JobStore, response_id: str, tenant: str) -> _Read:
    """A stored response and exactly the tokens its record counts. Raises JobNotFound and what ``storage.errors`` names."""
    record, entries = views.read_job(store, response_id, tenant)
    spec = JobSpec.from_json(record.spec)
    if spec.kind != KIND or not spec.request["echo"]["store"]:
        raise JobNotFound(f"there is no response {response_id}")
    return record, entries


def is_unstored(record: JobRecord) -> bool:
    """A response that was not to be kept for longer than its request."""
    spec = JobSpec.from_json(record.spec)
    return spec.kind == KIND and not spec.request["echo"]["store"]


async def new_response(
    context: Context,
    template: ChatTemplate,
    shape: ResponseShape,
    body: Mapping[str, Any],
    origin: submission.Origin,
    job_id: str | None = None,
) -> NewJob:
    """The job that ``body`` asks for. Raises ApiError and what ``storage.errors`` names."""
    asked = validate(ResponseRequest, body)
    submission.check_model(context, asked.model)
    response_id = job_id or submission.new_job_id(response_items.PREFIX)
    before = await _conversation_before(context, shape, asked, origin.tenant)
    items = [*before, *response_items.stored(response_id, asked.input)]
    if len(items) > MAX_ITEMS:
        raise InvalidRequest(
            f"input: the conversation has {len(items)} items with those before, and {MAX_ITEMS} are possible", param="input"
        )
    _check_outputs(items, len(before))
    use, messages = asked.tool_use, response_items.chat(asked.instructions, items, template.developer)
    prompt = await template.prompt(messages, use, {}, "input")
    max_tokens = submission.fit(context, len(prompt.tokens), asked.max_output_tokens, "input", "max_output_tokens")
    grammar = await answer_grammar(context, asked.text.format, "text.format", prompt.expected, use)
    spec = submission.make_spec(context, asked, max_tokens, metadata=asked.metadata, kind=KIND, grammar=grammar)
    spec = replace(spec, logprobs=asked.shown_logprobs, request=kept(asked, items, prompt.expected))
    hashed = submission.request_hash(body, origin)
    return submission.new_job(context, asked, origin, hashed, response_id, prompt.tokens, spec)


def _check_outputs(items: Sequence[response_items.Item], first: int) -> None:
    """``first``: index of the first item that the request brings."""
    called: set[str] = set()
    for index, item in enumerate(items):
        if item.get("type") == "function_call":
            called.add(item["call_id"])
        if item.get("type") == "function_call_output" and item["call_id"] not in called:
            place = f"input[{index - first}].call_id"
            raise InvalidRequest(f"{place}: no function_call before it has this call_id", param=place)


async def _conversation_before(
    context: Context, shape: ResponseShape, asked: ResponseRequest, tenant: str
) -> list[response_items.Item]:
    previous_id, param = asked.previous_response_id, "previous_response_id"
    if previous_id is None:
        return []
    try:
        record, entries = await context.store.run(lambda store: read_response(store, previous_id, tenant))
    except JobNotFound:
        raise InvalidRequest(
            f"{param}: there is no stored response {previous_id!r}", param=param, code="previous_response_not_found"
        ) from None
    if not record.status.terminal:
        raise InvalidRequest(f"{param}: {previous_id!r} is still {record.status}: wait for its end", param=param)
    return response_items.conversation(record, shape.whole(record, entries)["output"])


class ResponseLife(RequestJobs):
    """The job of one request, which ends with it where nobody could come back for it.

    A client can come back that sent an Idempotency-Key, or that knows the id of a stored response that goes on: one in the
    background, or one whose stream this api broke off. What is not stored is deleted once it was answered, or has no client.
    """

    def __init__(self, context: Context, canceller: Canceller, job_id: str, body: Mapping[str, Any], *, has_key: bool) -> None:
        super().__init__([job_id], None)
        self._drain = context.drain
        self._ends = canceller
        self._background = bool(body.get("background"))
        self._stored = body.get("store") is not False
        self._has_key = has_key
        self._heard = False

    def heard(self) -> None:
        self._heard = True

    def over(self, ended: Collection[str]) -> None:
        (job_id,) = self.ids
        if not self._stored and (ended or not self._may_come_back):
            self._ends.delete(job_id)
        elif not ended and not self._may_come_back:
            self._ends.cancel(job_id)

    @property
    def _may_come_back(self) -> bool:
        outlives = self._background or self._drain.draining
        return self._has_key or (self._stored and self._heard and outlives)


def ends_with_its_api(body: Mapping[str, Any], *, has_key: bool) -> bool:
    """Nobody can ask for it again when the api that serves it dies."""
    found_again = body.get("store") is not False and (body.get("background") or body.get("stream"))
    return not has_key and not found_again
