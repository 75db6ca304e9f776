"""Chat completions that were made with ``store``: found again by id, or in their tenant's list. Nothing is kept besides the
jobs themselves, so they go with them (``--retention-seconds``)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service.api import views
from service.api.context import Context
from service.api.edge import check_query, read_body
from service.api.jobs import checked_id
from service.api.openai.chat_answers import ChatShape
from service.api.openai.chat_requests import ChatUpdate
from service.api.openai.choices import Json
from service.api.openai.surface import Output
from service.api.problems import InvalidRequest, JobNotFound
from service.api.schemas import parse_json, validate
from storage.job_spec import JobSpec
from storage.job_store import JobStore
from storage.records import JobRecord, JobStatus

PREFIX = "chatcmpl-"
KIND = "chat"  #: of ``JobSpec``
_ENDED_WELL = (JobStatus.COMPLETED, JobStatus.INCOMPLETE)
_MAX_LIMIT = 100
_AFTER = "after: must be the id of the last item of the page before"


class StoredChats:
    def __init__(self, context: Context, shape: ChatShape) -> None:
        self._context = context
        self._shape = shape

    async def get(self, request: Request, completion_id: str) -> Response:
        check_query(request)
        return JSONResponse(self._shape.whole(await self._outputs(request, completion_id)))

    async def messages(self, request: Request, completion_id: str) -> Response:
        query = _Query.of(request)
        record = (await self._outputs(request, completion_id))[0].record
        sent = JobSpec.from_json(record.spec).request["messages"]
        shown = {f"{completion_id}-{i}": _message(f"{completion_id}-{i}", message) for i, message in enumerate(sent)}
        return JSONResponse(query.page([shown[one] for one in query.rest(list(shown))]))

    async def update(self, request: Request, completion_id: str) -> Response:
        asked = validate(ChatUpdate, parse_json(await read_body(request, self._context.options.max_body_bytes)))
        job_id = (await self._outputs(request, completion_id))[0].record.job_id
        text = json.dumps(asked.metadata, sort_keys=True, ensure_ascii=False)
        await self._context.store.run(lambda store: store.describe(job_id, text))
        return JSONResponse(self._shape.whole(await self._outputs(request, completion_id)))

    async def delete(self, request: Request, completion_id: str) -> Response:
        job_ids = [output.record.job_id for output in await self._outputs(request, completion_id)]
        await self._context.store.run(lambda store: store.delete(*job_ids))
        return JSONResponse({"id": completion_id, "object": "chat.completion.deleted", "deleted": True})

    async def page(self, request: Request) -> Response:
        query, tenant = _Query.of(request, filters=True), request.state.tenant

        def found(store: JobStore) -> list[Json]:
            shown: list[Json] = []
            cursor = _place(store, query.after, tenant)
            while len(shown) <= query.limit:
                page = store.jobs(tenant=tenant, stored=True, cursor=cursor, oldest_first=not query.newest_first)
                for record in page.jobs:
                    outputs = _read(store, record, tenant) if _stored(record) and query.wants(record) else None
                    shown += [self._shape.whole(outputs)] if outputs is not None else []
                cursor = page.next_cursor
                if cursor is None:
                    break
            return shown

        return JSONResponse(query.page(await self._context.store.run(found)))

    async def _outputs(self, request: Request, completion_id: str) -> list[Output]:
        """Of all choices. Raises JobNotFound for what is no stored completion, or not yet whole."""
        job_id, tenant = checked_id(completion_id), request.state.tenant

        def read(store: JobStore) -> list[Output] | None:
            record = store.get(job_id)
            return _read(store, record, tenant) if record is not None and record.tenant == tenant and _stored(record) else None

        found = await self._context.store.run(read)
        if found is None:
            raise JobNotFound(f"there is no stored completion {job_id}, or it is not finished")
        return found


def _stored(record: JobRecord) -> bool:
    """The first job of a completion with ``store``."""
    spec = JobSpec.from_json(record.spec)
    return spec.kind == KIND and bool(spec.request.get("store")) and record.group in ("", record.job_id)


def _place(store: JobStore, after: str | None, tenant: str) -> str | None:
    """Where the list goes on behind this one. Raises InvalidRequest."""
    if after is None:
        return None
    record = store.get(after)
    if record is None or record.tenant != tenant or not record.stored:
        raise InvalidRequest(_AFTER, param="after")
    return str(record.order)


def _read(store: JobStore, first: JobRecord, tenant: str) -> list[Output] | None:
    """None: a choice failed, is not finished, or is gone."""
    ids = [first.job_id, *(f"{first.job_id}-{i}" for i in range(1, JobSpec.from_json(first.spec).request["n"]))]
    try:
        outputs = [Output(record, tuple(entries)) for record, entries in (views.read_job(store, i, tenant) for i in ids)]
    except JobNotFound:
        return None
    return outputs if all(output.record.status in _ENDED_WELL for output in outputs) else None


def _message(message_id: str, sent: Mapping[str, Any]) -> Json:
    parts = sent.get("content") if isinstance(sent.get("content"), list) else None
    text = "".join(part["text"] for part in parts) if parts is not None else sent.get("content")
    return {**sent, "id": message_id, "content": text, "content_parts": parts}


@dataclass(frozen=True, slots=True)
class _Query:
    """What a list is asked for."""

    after: str | None
    limit: int
    newest_first: bool
    model: str | None
    metadata: dict[str, str]

    @classmethod
    def of(cls, request: Request, *, filters: bool = False) -> "_Query":
        """Raises InvalidRequest that names the parameter."""
        query = request.query_params
        metadata = {name: value for name, value in query.items() if filters and name.startswith("metadata[") and name.endswith("]")}
        check_query(request, frozenset({"after", "limit", "order", *metadata, *(["model"] if filters else [])}))
        limit, order = query.get("limit", "20"), query.get("order", "asc")
        if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _MAX_LIMIT):
            raise InvalidRequest(f"limit: must be a whole number from 1 to {_MAX_LIMIT}", param="limit")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order: must be asc or desc", param="order")
        by_name = {name[len("metadata[") : -1]: value for name, value in metadata.items()}
        return cls(query.get("after"), int(limit), order == "desc", query.get("model"), by_name)

    def wants(self, record: JobRecord) -> bool:
        model = JobSpec.from_json(record.spec).model
        return self.model in (None, model) and self.metadata.items() <= views.metadata(record).items()

    def rest(self, ids: Sequence[str]) -> Sequence[str]:
        """Of ``ids``, oldest first, those to come, in the order that was asked for."""
        ids = ids[::-1] if self.newest_first else ids
        if self.after is None:
            return ids
        if self.after not in ids:
            raise InvalidRequest(_AFTER, param="after")
        return ids[ids.index(self.after) + 1 :]

    def page(self, items: list[Json]) -> Json:
        """``items``: at least one more than fit, where there are."""
        page = items[: self.limit]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }
