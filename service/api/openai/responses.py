"""``/v1/responses``: OpenAI's Responses over jobs. Each is durable, and its stream goes on behind any event that a client saw."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service.api import submission
from service.api.context import Context
from service.api.edge import check_query, read_body
from service.api.jobs import checked_id
from service.api.openai import response_items, surface
from service.api.openai import response_operations as operations
from service.api.openai.canceller import Canceller
from service.api.openai.response_answers import ResponseShape
from service.api.openai.response_events import ResponseEvents, last_number
from service.api.openai.response_jobs import ResponseLife, ends_with_its_api, new_response, read_response
from service.api.openai.response_requests import INCLUDABLE
from service.api.openai.surface import Output, RequestJobs
from service.api.openai.template import ChatTemplate
from service.api.problems import CursorAhead, InvalidRequest
from service.api.schemas import parse_json
from service.api.streams import EventStream
from service.api.tailer import Tailer
from storage.job_spec import JobSpec
from storage.records import JobRecord, LogEntry, NewJob

_NUMBER = re.compile(r"[0-9]{1,15}")
_MAX_LIMIT = 100
_INCLUDE = frozenset({"include", "include[]"})  #: the SDK's way to write a list, and everybody else's


class Responses:
    path, prefix = "/v1/responses", response_items.PREFIX

    def __init__(self, context: Context) -> None:
        self._context = context
        self._template = ChatTemplate(context)
        self.shape = ResponseShape(context.model)

    async def jobs(self, body: Mapping[str, Any], origin: submission.Origin, job_id: str | None = None) -> tuple[NewJob, ...]:
        return (await new_response(self._context, self._template, self.shape, body, origin, job_id),)

    def answer(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """A response that failed or was cancelled is one, too: its status says so."""
        (output,) = outputs
        return self.shape.whole(output.record, output.entries)

    def events(self, jobs: RequestJobs, body: Mapping[str, Any]) -> ResponseEvents:
        return ResponseEvents(self._context, self.shape, jobs)


def response_routes(context: Context, tailer: Tailer) -> APIRouter:
    router = APIRouter(tags=["openai"])
    endpoints = _Endpoints(context, tailer)

    @router.post("/v1/responses", **operations.CREATE_RESPONSE)
    async def create(request: Request) -> Response:
        """OpenAI's Responses, with the sampling fields of the native jobs."""
        return await endpoints.create(request)

    @router.get("/v1/responses/{response_id}", **operations.GET_RESPONSE)
    async def get(request: Request, response_id: str) -> Response:
        """The response as it is now; with stream=true its events, from the first or from behind `starting_after` on."""
        return await endpoints.get(request, response_id)

    @router.post("/v1/responses/{response_id}/cancel", **operations.CANCEL_RESPONSE)
    async def cancel(request: Request, response_id: str) -> Response:
        """Ends a background response at once. One that has ended already is answered as it is."""
        return await endpoints.cancel(request, response_id)

    @router.delete("/v1/responses/{response_id}", **operations.DELETE_RESPONSE)
    async def delete(request: Request, response_id: str) -> Response:
        """At once, whole, and whether it has ended or not."""
        return await endpoints.delete(request, response_id)

    @router.get("/v1/responses/{response_id}/input_items", **operations.LIST_INPUT_ITEMS)
    async def input_items(request: Request, response_id: str) -> Response:
        """The conversation that the response answers, what came before it included; newest first."""
        return await endpoints.input_items(request, response_id)

    return router


class _Endpoints:
    def __init__(self, context: Context, tailer: Tailer) -> None:
        self._context = context
        self._tailer = tailer
        self._canceller = Canceller(context)
        self._surface = Responses(context)

    async def create(self, request: Request) -> Response:
        context = self._context
        origin = submission.Origin.of(request)
        body = parse_json(await read_body(request, context.options.max_body_bytes))
        (job,) = await self._surface.jobs(body, origin)
        has_key = origin.idempotency_key is not None
        if ends_with_its_api(body, has_key=has_key):
            job = replace(job, served_by=context.incarnation)

        def life(job_ids: Sequence[str]) -> RequestJobs:
            return ResponseLife(context, self._canceller, job_ids[0], body, has_key=has_key)

        made, replayed = await surface.submit(context, [job], life)
        if body.get("background") and not body.get("stream"):
            return await self._accepted(request, made, replayed=replayed)
        return surface.respond(context, self._tailer, self._surface, body, made, replayed=replayed)

    async def _accepted(self, request: Request, made: RequestJobs, *, replayed: bool) -> Response:
        try:
            record, entries = await self._read(request, made.ids[0])
            made.heard()
        finally:
            made.over(())
        headers = {"Idempotent-Replayed": "true"} if replayed else None
        return JSONResponse(self._surface.shape.whole(record, entries), headers=headers)

    async def get(self, request: Request, response_id: str) -> Response:
        check_query(request, frozenset({"stream", "starting_after", "include_obfuscation", *_INCLUDE}))
        _check_include(request)
        streamed, _ = _flag(request, "stream"), _flag(request, "include_obfuscation")
        after = _starting_after(request)
        if after is not None and not streamed:
            raise InvalidRequest("starting_after: only together with stream=true", param="starting_after")
        record, entries = await self._read(request, response_id)
        if not streamed:
            return JSONResponse(self._surface.shape.whole(record, entries))
        last = last_number(self._surface.shape, record, entries) if after is not None and not record.status.terminal else None
        if after is not None and last is not None and after > last:
            raise CursorAhead(
                f"starting_after: event {after} is ahead of the log, which makes {last + 1} events: the "
                "store does not hold what you saw (was an older copy of its directory put back?); start again without it",
                param="starting_after",
            )
        events = ResponseEvents(self._context, self._surface.shape, RequestJobs([response_id], None), after)
        return EventStream(self._context, self._tailer, [response_id], 0, events)

    async def cancel(self, request: Request, response_id: str) -> Response:
        record, _ = await self._read(request, response_id)
        if not JobSpec.from_json(record.spec).request["echo"]["background"]:
            raise InvalidRequest(
                "this response is not cancellable, for it does not run in the background: close its connection instead",
                param="response_id",
                code="not_cancellable",
            )
        await self._context.store.run(lambda store: store.cancel(response_id))
        return JSONResponse(self._surface.shape.whole(*await self._read(request, response_id)))

    async def delete(self, request: Request, response_id: str) -> Response:
        await self._read(request, response_id)
        await self._context.store.run(lambda store: store.delete(response_id))
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: Request, response_id: str) -> Response:
        check_query(request, frozenset({"after", "limit", "order", *_INCLUDE}))
        _check_include(request)
        query = request.query_params
        limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
        if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MAX_LIMIT:
            raise InvalidRequest(f"limit: must be a whole number from 1 to {_MAX_LIMIT}", param="limit")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order: must be asc or desc", param="order")
        record, _ = await self._read(request, response_id)
        items: list[response_items.Item] = JobSpec.from_json(record.spec).request["items"]
        if order == "desc":
            items.reverse()
        return JSONResponse(_page(items, after, int(limit)))

    async def _read(self, request: Request, response_id: str) -> tuple[JobRecord, list[LogEntry]]:
        checked = checked_id(response_id)
        return await self._context.store.run(lambda store: read_response(store, checked, request.state.tenant))


def _page(items: list[response_items.Item], after: str | None, limit: int) -> dict[str, Any]:
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidRequest("after: must be the id of an item of this response", param="after")
    first = 0 if after is None else ids.index(after) + 1
    page = items[first : first + limit]
    return {
        "object": "list",
        "data": [response_items.shown(item) for item in page],
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": first + limit < len(items),
    }


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidRequest(f"{name}: must be true or false", param=name)
    return text == "true"


def _starting_after(request: Request) -> int | None:
    text = request.query_params.get("starting_after")
    if text is not None and not _NUMBER.fullmatch(text):
        raise InvalidRequest(
            "starting_after: must be the sequence_number of the last event seen", param="starting_after", code="invalid_cursor"
        )
    return int(text) if text is not None else None


def _check_include(request: Request) -> None:
    for name in _INCLUDE:
        for value in request.query_params.getlist(name):
            if value not in INCLUDABLE:
                raise InvalidRequest(f"{name}: must be one of {', '.join(INCLUDABLE)}", param=name)
