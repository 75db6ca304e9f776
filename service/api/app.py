"""The application: routes, errors, and the two threads that live as long as it does."""

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from service.api.background import Background
from service.api.completions import completion_routes
from service.api.context import Context
from service.api.edge import Edge, add_error_handlers
from service.api.jobs import job_routes
from service.api.probes import model_routes, probe_routes
from service.api.tailer import Tailer
from service.version import own_version


def create_app(context: Context) -> FastAPI:
    tailer = Tailer(context.store, context.options.poll_interval)
    background = Background(context)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        tailer.start()
        background.start()
        try:
            yield
        finally:
            background.stop()
            await tailer.stop()

    app = FastAPI(
        title="Midsentence",
        summary="Long generation jobs that survive crashes, token for token.",
        version=own_version(),
        lifespan=lifespan,
        redoc_url=None,
        docs_url=None,  # the page would fetch scripts from elsewhere; /openapi.json is there
    )
    app.add_middleware(Edge, context=context)
    add_error_handlers(app)
    for router in (job_routes(context, tailer), completion_routes(context, tailer), model_routes(context), probe_routes(context)):
        app.include_router(router)
    return app
