"""How the whole service does: ``GET /v1/overview`` for one look, ``/v1/overview/events`` for one each second.

It tells of engines, pages and numbers of jobs, like ``/metrics``: nothing in it names a job, a tenant or a text.
"""

import asyncio
import json
import time
from typing import Any

from fastapi import APIRouter
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from service.api import openapi
from service.api.context import Context
from service.api.edge import check_query
from service.api.problems import InvalidRequest
from service.api.streams import SSE_HEADERS
from service.api.vitals import Vitals
from service.settings import is_loopback
from storage.records import EngineRecord

#: A page of another origin cannot send it: its browser would ask us first, and we do not answer such questions.
KILL_HEADER = "X-Midsentence-Demo"


def overview_routes(context: Context) -> APIRouter:
    router, vitals = APIRouter(tags=["overview"]), Vitals(context)

    @router.get("/v1/overview", **openapi.OVERVIEW)
    async def look(request: Request) -> Response:
        """Engines, pages, numbers of jobs and what happened lately. Page maps are there while somebody follows the events."""
        check_query(request)
        return JSONResponse(overview(context, vitals))

    @router.get("/v1/overview/events", **openapi.OVERVIEW_EVENTS)
    async def events(request: Request) -> Response:
        """The same once a second, each whole: there is nothing to resume. Ends after some minutes; come again."""
        check_query(request)
        return OverviewStream(context, vitals)

    kill = context.kill_engine
    if kill is not None:

        @router.post("/v1/demo/kill-engine", include_in_schema=False)
        async def kill_engine(request: Request) -> Response:
            """SIGKILL to the engine of our supervisor, which starts another."""
            host = request.url.hostname or ""
            if request.headers.get(KILL_HEADER) != "kill-engine" or not is_loopback(host):
                raise InvalidRequest(f"{KILL_HEADER}: must be kill-engine, sent to this machine by its own name", param=KILL_HEADER)
            context.timeline.killed()
            kill()
            return JSONResponse({"killed": "engine"}, 202)

    return router


def overview(context: Context, vitals: Vitals) -> dict[str, Any]:
    view, timeline = context.view, context.timeline
    return {
        "object": "overview",
        "now": time.time(),
        "model": context.model.name,
        "store_away_since": timeline.store_away_since,
        "jobs": {} if view is None else {status.value: count for status, count in view.counts.items()},
        "engines": [] if view is None else [_engine(context, vitals, record) for record in view.engines],
        "timeline": timeline.moments(),
        "demo_controls": context.kill_engine is not None,
    }


def _engine(context: Context, vitals: Vitals, record: EngineRecord) -> dict[str, Any]:
    info, view = record.info, context.view
    living = view is not None and info.engine_id in view.living
    told = vitals.latest(info.engine_id, record.incarnation)
    return {
        "id": info.engine_id,
        "incarnation": record.incarnation,
        "model": info.model_name if info.model_fingerprint != context.model.fingerprint else context.model.name,
        "state": "dead" if record.dead else "living" if living else "silent",
        "silent_seconds": context.timeline.silent_seconds(info.engine_id),
        "jobs": len(record.job_ids),
        "page_size": info.page_size,
        "device_pages": info.device_pages,
        "vitals": None if told is None else {"at": told[0], **_public(told[1])},
    }


def _public(vitals: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in vitals.items() if name not in ("engine_id", "incarnation")}


class OverviewStream(Response):
    """One event each second. A viewer whose key was taken away sees no more after ``overview_seconds``."""

    def __init__(self, context: Context, vitals: Vitals) -> None:
        self.background: BackgroundTask | None = None
        self._context = context
        self._vitals = vitals
        self.status_code = 200
        self.init_headers(SSE_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, wake_up = self._context, asyncio.Event()
        with context.streams.one_for(scope["state"]["tenant"]), context.drain.waking(wake_up), self._vitals.watching():
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            watcher = asyncio.create_task(_wait_for_end(receive, wake_up))
            try:
                await self._stream(send, wake_up)
            finally:
                watcher.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stream(self, send: Send, wake_up: asyncio.Event) -> None:
        loop, options = asyncio.get_running_loop(), self._context.options
        until = loop.time() + options.overview_seconds
        while loop.time() < until and not (wake_up.is_set() or self._context.drain.draining):
            text = json.dumps(overview(self._context, self._vitals), ensure_ascii=False, separators=(",", ":"))
            await send({"type": "http.response.body", "body": f"event: overview\ndata: {text}\n\n".encode(), "more_body": True})
            try:
                async with asyncio.timeout(options.poll_interval):
                    await wake_up.wait()
            except TimeoutError:
                continue


async def _wait_for_end(receive: Receive, wake_up: asyncio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    wake_up.set()
