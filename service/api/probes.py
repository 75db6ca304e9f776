"""Health, readiness, metrics, version and the list of models. None of these waits for the store."""

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

from service.api import openapi
from service.api.context import Context
from service.api.problems import ModelNotFound
from service.api_keys import WITHHELD_REASON
from service.version import own_version
from storage.errors import StoreFull, StoreUnavailable

#: The sweep looks every second; an older look says nothing about now.
_STALE_AFTER = 5.0


def probe_routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["operation"])

    @router.get("/livez", **openapi.LIVENESS)
    @router.head("/livez", include_in_schema=False)
    async def livez() -> Response:
        """The process answers; says nothing of Redis or engines."""
        return JSONResponse({"live": True})

    @router.get("/readyz", **openapi.READINESS)
    @router.head("/readyz", include_in_schema=False)
    async def readyz() -> Response:
        """200 when jobs are taken and an engine works on them; else 503 with reasons."""
        return _ready(context)

    @router.get("/health", **openapi.READINESS)
    @router.head("/health", include_in_schema=False)
    async def health() -> Response:
        """The same as /readyz, under the name that other servers use."""
        return _ready(context)

    @router.get("/metrics", **openapi.METRICS)
    @router.head("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(context.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version", **openapi.VERSION)
    @router.head("/version", include_in_schema=False)
    async def show_version() -> Response:
        return JSONResponse({"version": own_version(), "model": context.model.name})

    return router


def model_routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["openai"])

    @router.get("/v1/models", **openapi.LIST_MODELS)
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(context)]})

    @router.get("/v1/models/{model:path}", **openapi.GET_MODEL)
    async def model(model: str) -> Response:
        if model not in context.model.names:
            raise ModelNotFound(f"there is no model {model[:200]!r} here", param="model")
        return JSONResponse(_model(context))

    return router


def _model(context: Context) -> dict[str, Any]:
    return {
        "id": context.model.name,
        "object": "model",
        "created": context.model.created,
        "owned_by": "midsentence",
        "max_model_len": context.model.tokenization.context_length,
    }


def _ready(context: Context) -> Response:
    reasons = not_ready(context)
    if context.keys is not None:  # strangers ask, too: they need not hear of hosts and paths
        reasons = dict.fromkeys(reasons, WITHHELD_REASON)
    headers = {"Retry-After": "2"} if reasons else None
    return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200, headers)


def not_ready(context: Context) -> dict[str, str]:
    """Why this api is not ready; empty when it is."""
    if context.drain.draining:
        return {"draining": "this server is about to end"}
    if context.drain.retiring:
        return {"retiring": "another API of this service has taken over: connect again"}
    view = context.view
    if view is None:
        return {"redis": "not looked at yet"}
    if view.error is not None:
        # Away is a pause; a store that is not ours needs a person.
        return {"redis" if isinstance(view.error, StoreUnavailable | StoreFull) else "store": str(view.error)}
    if view.age() > _STALE_AFTER:
        return {"redis": f"has not answered for {view.age():.0f} s"}
    engines = context.engines_of_model()
    if not engines:
        return {"engine": f"waiting for an engine of model {context.model.name!r} to register"}
    if not any(engine.info.engine_id in view.living for engine in engines):
        return {"engine": f"none of the {len(engines)} registered engines has been heard of lately"}
    return {}
