"""``/v1/batches``: durable, as everything here: whatever dies, each line gets its one answer."""

from collections.abc import Mapping

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service.api import submission
from service.api.context import Context
from service.api.edge import check_query, read_body
from service.api.openai import batch_openapi as openapi
from service.api.openai.batch_requests import BatchRequest
from service.api.openai.batch_views import batch_object
from service.api.openai.file_ids import BATCH_PREFIX, checked_batch_id, line_prefix, new_id
from service.api.openai.files import list_object, page_limit
from service.api.openai.surface import Surface
from service.api.problems import BatchNotFound, FileNotFound, IdempotencyConflict, InvalidRequest, TooManyBatches
from service.api.schemas import parse_json, validate
from storage.batch_records import BatchRecord, CreatedBatch, CreateOutcome, NewBatch

#: Of all tenants: each costs its feeders a look every second.
MAX_LIVE = 1000
_DAY = 86_400.0


def batch_routes(context: Context, surfaces: Mapping[str, Surface]) -> APIRouter:
    router = APIRouter(tags=["openai"])
    batches = Batches(context, surfaces)

    @router.post("/v1/batches", **openapi.CREATE_BATCH)
    async def create_batch(request: Request) -> Response:
        """Run the requests of an uploaded file. Nothing runs before all lines were found valid."""
        return await batches.create(request)

    @router.get("/v1/batches", **openapi.LIST_BATCHES)
    async def list_batches(request: Request) -> Response:
        return await batches.list(request)

    @router.get("/v1/batches/{batch_id}", **openapi.GET_BATCH)
    async def get_batch(request: Request, batch_id: str) -> Response:
        return batches.answer(await batches.find(batch_id, request.state.tenant))

    @router.post("/v1/batches/{batch_id}/cancel", **openapi.CANCEL_BATCH)
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        """What is finished stays; what runs is ended, and the rest never runs."""
        return await batches.cancel(batch_id, request.state.tenant)

    return router


class Batches:
    def __init__(self, context: Context, surfaces: Mapping[str, Surface]) -> None:
        self._context = context
        self._surfaces = surfaces

    def answer(self, batch: BatchRecord, headers: dict[str, str] | None = None) -> Response:
        return JSONResponse(batch_object(batch, self._context.model.name), headers=headers)

    async def find(self, batch_id: str, tenant: str) -> BatchRecord:
        checked = checked_batch_id(batch_id)
        batch = await self._context.store.run(lambda store: store.batches.batch(checked))
        if batch is None or batch.tenant != tenant:
            raise BatchNotFound("there is no such batch")
        return batch

    async def create(self, request: Request) -> Response:
        origin = submission.Origin.of(request)
        body = parse_json(await read_body(request, self._context.options.max_body_bytes))
        asked = validate(BatchRequest, body)
        surface = self._surfaces.get(asked.endpoint)
        if surface is None:
            raise InvalidRequest(f"endpoint: must be one of {', '.join(self._surfaces)}", param="endpoint")
        batch_id = new_id(BATCH_PREFIX, origin.tenant, origin.idempotency_key)
        new = NewBatch(
            batch_id=batch_id,
            input_file_id=asked.input_file_id,
            line_prefix=line_prefix(batch_id, surface.prefix),
            endpoint=asked.endpoint,
            window_seconds=_DAY,
            request_hash=submission.request_hash(body, origin),
            tenant=origin.tenant,
            metadata=asked.metadata,
            request_id=origin.request_id,
            traceparent=origin.traceparent,
        )
        made = await submission.until_answered(self._context, lambda store: store.batches.create_batch(new, limit=MAX_LIVE))
        replayed = made.outcome is CreateOutcome.EXISTS
        return self.answer(_created(made, new), {"Idempotent-Replayed": "true"} if replayed else None)

    async def list(self, request: Request) -> Response:
        check_query(request, frozenset({"limit", "after"}))
        query, tenant = request.query_params, request.state.tenant
        before = None
        if (after := query.get("after")) is not None:
            try:
                before = (await self.find(after, tenant)).order
            except BatchNotFound:
                raise InvalidRequest("after: there is no such batch", param="after") from None
        limit = page_limit(query)
        page = await self._context.store.run(lambda store: store.batches.batch_page(tenant, limit=limit, before=before))
        shown = [batch_object(batch, self._context.model.name) for batch in page.batches]
        return JSONResponse(list_object(shown, page.more))

    async def cancel(self, batch_id: str, tenant: str) -> Response:
        batch = await self.find(batch_id, tenant)
        if batch.status.terminal and batch.status != "cancelled":
            # 400, not OpenAI's 409: its SDK sends a request again after a 409
            raise InvalidRequest(f"the batch cannot be cancelled: it is {batch.status}", code="batch_not_cancellable")
        after = await submission.until_answered(self._context, lambda store: store.batches.cancel_batch(batch.batch_id))
        return self.answer(after or batch)


def _created(made: CreatedBatch, new: NewBatch) -> BatchRecord:
    if made.outcome is CreateOutcome.NO_FILE:
        raise FileNotFound("input_file_id: there is no such file", param="input_file_id")
    if made.outcome is CreateOutcome.FULL:
        raise TooManyBatches(f"{MAX_LIVE} batches are under way: try again when some have ended")
    if made.record is None:
        raise TooManyBatches("the batch of this Idempotency-Key is old and just being removed: try again", param="Idempotency-Key")
    if made.record.request_hash != new.request_hash:
        raise IdempotencyConflict("this Idempotency-Key came before with another batch", param="Idempotency-Key")
    return made.record
