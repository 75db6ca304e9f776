"""``/v1/files``: uploads for batches, and the views that are batches' outputs."""

import re
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from service.api import submission
from service.api.context import Context
from service.api.edge import check_query
from service.api.openai import batch_openapi as openapi
from service.api.openai.batch_lines import read_chunks
from service.api.openai.batch_views import BatchView, file_object, has_view, view_object
from service.api.openai.file_ids import FILE_PREFIX, batch_of_view, checked_file_id, new_id
from service.api.openai.surface import Surface
from service.api.openai.uploads import Upload
from service.api.problems import FileNotFound, FileStoreFull, IdempotencyConflict, InvalidRequest
from storage.batch_records import BatchOutput, BatchRecord, CreateOutcome, FileRecord, NewFile

#: Of one tenant.
MAX_FILES = 10_000
_LIMIT = re.compile(r"[0-9]{1,4}")
_SIZES_KEPT = 256


def file_routes(context: Context, surfaces: Mapping[str, Surface]) -> APIRouter:
    router = APIRouter(tags=["openai"])
    files = Files(context, surfaces)

    @router.post("/v1/files", **openapi.CREATE_FILE)
    async def create_file(request: Request) -> Response:
        """Upload the input of a batch: JSON lines. Once answered, it is durable."""
        return await files.create(request)

    @router.get("/v1/files", **openapi.LIST_FILES)
    async def list_files(request: Request) -> Response:
        """What was uploaded, newest first. Output and error files are named by their batches."""
        return await files.list(request)

    @router.get("/v1/files/{file_id}", **openapi.GET_FILE)
    async def get_file(request: Request, file_id: str) -> Response:
        return JSONResponse(await files.describe(file_id, request.state.tenant))

    @router.delete("/v1/files/{file_id}", **openapi.DELETE_FILE)
    async def delete_file(request: Request, file_id: str) -> Response:
        """It is seen no more. The bytes of an upload go at once, or with the last batch made of it; an output's with its batch."""
        return await files.delete(file_id, request.state.tenant)

    @router.get("/v1/files/{file_id}/content", **openapi.GET_CONTENT)
    async def get_file_content(request: Request, file_id: str) -> Response:
        return await files.content(file_id, request.state.tenant)

    return router


class Files:
    def __init__(self, context: Context, surfaces: Mapping[str, Surface]) -> None:
        self._context = context
        self._surfaces = surfaces
        self._sizes: dict[str, int] = {}  #: of views that were rendered to be measured; an ended batch's never change

    async def create(self, request: Request) -> Response:
        origin = submission.Origin.of(request)
        upload = Upload(self._context, request)
        kept = False
        try:
            await upload.receive()
            new = self._checked(upload, origin)
            made = await submission.until_answered(self._context, lambda store: store.batches.create_file(new, limit=MAX_FILES))
            record = made.record
            kept = record is not None and record.upload_id == upload.upload_id
        finally:
            if not kept:
                await upload.drop()
        if made.outcome is CreateOutcome.FULL:
            raise FileStoreFull(f"{MAX_FILES} files are kept of one tenant: delete some")
        if made.outcome is CreateOutcome.INCOMPLETE:
            raise InvalidRequest("file: the upload took so long that it was given up: send it again", param="file")
        if record is None:
            raise IdempotencyConflict(
                "the file of this Idempotency-Key was deleted while a batch needs it", param="Idempotency-Key"
            )
        if record.sha256 != new.sha256:
            raise IdempotencyConflict("this Idempotency-Key came before with another file", param="Idempotency-Key")
        shown = file_object(record, self._context.options.retention_seconds)
        return JSONResponse(shown, headers={} if kept else {"Idempotent-Replayed": "true"})

    def _checked(self, upload: Upload, origin: submission.Origin) -> NewFile:
        form = upload.form
        for name in form.values:
            if name != "purpose":
                raise InvalidRequest(f"{name[:64]}: this field is not supported here", param=name[:64], code="unknown_field")
        if form.values.get("purpose") != "batch":
            raise InvalidRequest("purpose: files are for batches here: it must be 'batch'", param="purpose")
        if form.filename is None:
            raise InvalidRequest("file: this field is required", param="file", code="missing_field")
        if not upload.num_bytes:
            raise InvalidRequest("file: the file is empty", param="file", code="empty_file")
        return NewFile(
            file_id=new_id(FILE_PREFIX, origin.tenant, origin.idempotency_key),
            upload_id=upload.upload_id,
            chunks=upload.chunks,
            num_bytes=upload.num_bytes,
            sha256=upload.sha256,
            filename=form.filename,
            tenant=origin.tenant,
        )

    async def list(self, request: Request) -> Response:
        check_query(request, frozenset({"limit", "after", "purpose"}))
        query, tenant = request.query_params, request.state.tenant
        if query.get("purpose", "batch") != "batch":
            raise InvalidRequest("purpose: uploads are listed, and theirs is batch; batches name the others", param="purpose")
        before = None
        if (after := query.get("after")) is not None:
            found = await self._find(after, tenant, lambda: InvalidRequest("after: there is no such file", param="after"))
            before = found.order
        limit = page_limit(query)
        page = await self._context.store.run(lambda store: store.batches.files(tenant, limit=limit, before=before))
        retention = self._context.options.retention_seconds
        return JSONResponse(list_object([file_object(file, retention) for file in page.files], page.more))

    async def describe(self, file_id: str, tenant: str) -> dict[str, Any]:
        retention = self._context.options.retention_seconds
        view = await self._view(file_id, tenant)
        if view is None:
            return file_object(await self._find(file_id, tenant, _not_found), retention)
        batch, kind, lines = view
        size = self._sizes.get(file_id)
        if size is None:
            size = sum([len(line) async for line in lines.lines()])
            self._sizes = dict([*self._sizes.items(), (file_id, size)][-_SIZES_KEPT:])
        return view_object(batch, kind, size, retention)

    async def delete(self, file_id: str, tenant: str) -> Response:
        view = await self._view(file_id, tenant)
        if view is not None:
            batch, kind, _ = view
            await self._context.store.run(lambda store: store.batches.delete_output(batch.batch_id, kind))
        else:
            await self._find(file_id, tenant, _not_found)
            await self._context.store.run(lambda store: store.batches.delete_file(file_id))
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def content(self, file_id: str, tenant: str) -> Response:
        view = await self._view(file_id, tenant)
        if view is not None:
            return StreamingResponse(await _begun(view[2].lines()), media_type="application/jsonl")
        file = await self._find(file_id, tenant, _not_found)
        chunks = await _begun(read_chunks(self._context, file))
        return StreamingResponse(chunks, media_type="application/jsonl", headers={"Content-Length": str(file.num_bytes)})

    async def _view(self, file_id: str, tenant: str) -> tuple[BatchRecord, BatchOutput, BatchView] | None:
        """None: it is no view. Raises FileNotFound for one that is not there yet or any more, or is another tenant's."""
        named = batch_of_view(checked_file_id(file_id))
        if named is None:
            return None
        kind, batch_id = named
        batch = await self._context.store.run(lambda store: store.batches.batch(batch_id))
        surface = self._surfaces.get(batch.endpoint) if batch is not None else None
        if batch is None or surface is None or batch.tenant != tenant:
            raise _not_found()
        if not has_view(batch, kind) or kind in batch.deleted:
            raise _not_found()
        return batch, kind, BatchView(self._context, surface, batch, kind)

    async def _find(self, file_id: str, tenant: str, otherwise: Callable[[], Exception]) -> FileRecord:
        file = await self._context.store.run(lambda store: store.batches.file(file_id))
        if file is None or file.tenant != tenant:
            raise otherwise()
        return file


def _not_found() -> FileNotFound:
    return FileNotFound("there is no such file")


async def _begun(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The first piece is read now: a store that is away is an answer then, and not half a file."""
    first = await anext(pieces, b"")

    async def rest() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    return rest()


def page_limit(query: QueryParams) -> int:
    limit = query.get("limit", "20")
    if not _LIMIT.fullmatch(limit) or not 1 <= int(limit) <= openapi.MAX_LIMIT:
        raise InvalidRequest(f"limit: must be a whole number from 1 to {openapi.MAX_LIMIT}", param="limit")
    return int(limit)


def list_object(data: "list[dict[str, Any]]", more: bool) -> dict[str, Any]:
    ids = [each["id"] for each in data]
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return {"object": "list", "data": data, **ends, "has_more": more}
