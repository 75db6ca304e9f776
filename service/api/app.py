"""The application: routes, errors, and what lives as long as it does: two threads and a task."""

import contextlib
import functools
from collections.abc import AsyncIterator

from fastapi import FastAPI

from service.api.background import Background
from service.api.context import Context
from service.api.edge import Edge, add_error_handlers
from service.api.gate import Gate
from service.api.jobs import job_routes
from service.api.openai.batch_feeder import BatchFeeder
from service.api.openai.batches import batch_routes
from service.api.openai.chat import ChatCompletions, chat_routes
from service.api.openai.completions import Completions, completion_routes
from service.api.openai.files import file_routes
from service.api.openai.responses import Responses, response_routes
from service.api.openai.surface import Surface
from service.api.openapi import described
from service.api.overview import overview_routes
from service.api.probes import model_routes, probe_routes
from service.api.static import static_routes
from service.api.tailer import Tailer
from service.version import own_version


def create_app(context: Context) -> FastAPI:
    tailer = Tailer(context.store, context.options.poll_interval)
    background = Background(context)
    asked_for: tuple[Surface, ...] = (Completions(context), ChatCompletions(context), Responses(context))
    surfaces = {surface.path: surface for surface in asked_for}  #: what lines of batches may ask for
    feeder = BatchFeeder(context, surfaces)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        tailer.start()
        background.start()
        feeder.start()
        try:
            yield
        finally:
            background.stop()
            await feeder.stop()
            await tailer.stop()

    app = FastAPI(
        title="Midsentence",
        summary="Long generation jobs that survive crashes, token for token.",
        version=own_version(),
        lifespan=lifespan,
        redoc_url=None,
        docs_url=None,  # the page would fetch scripts from elsewhere; /openapi.json is there
    )
    app.add_middleware(Gate, context=context)
    app.add_middleware(Edge, context=context)  # around the gate: a refusal gets its id, its form and its line in the log
    add_error_handlers(app)
    native = (job_routes(context, tailer), overview_routes(context), probe_routes(context), static_routes())
    openai = [routes(context, tailer) for routes in (completion_routes, chat_routes, response_routes)]
    openai += [file_routes(context, surfaces), batch_routes(context, surfaces), model_routes(context)]
    for router in (*native, *openai):
        app.include_router(router)
    app.openapi = functools.cache(lambda: described(app))  # type: ignore[method-assign]
    return app
