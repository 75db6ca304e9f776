"""The web server of events.html: it serves the page, and hands what the page asks of ``/v1/jobs`` on to Midsentence.

    MIDSENTENCE_URL=http://localhost:8710 uvicorn --app-dir docs/examples events_server:app --port 8080

A browser needs such a server: the API sends no CORS headers, so a page of another origin cannot read its answers, and an
EventSource cannot send an API key. So page and API share one origin, and the key stays here. Your web framework, or nginx with
``proxy_buffering off``, does the same. Let nobody submit jobs here whom you would not give the key.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

PAGE = Path(__file__).with_name("events.html")
HANDED_ON = ("Content-Type", "Idempotency-Key", "Last-Event-ID")
KEY = os.environ.get("MIDSENTENCE_API_KEY")

# Silent streams get a comment every 15 s.
client = httpx.AsyncClient(base_url=os.environ.get("MIDSENTENCE_URL", "http://localhost:8710"), timeout=60)


async def page(_request: Request) -> Response:
    return FileResponse(PAGE)


async def jobs(request: Request) -> Response:
    headers = {name: request.headers[name] for name in HANDED_ON if name in request.headers}
    if KEY is not None:
        headers["Authorization"] = f"Bearer {KEY}"
    url = httpx.URL(path=request.url.path, query=request.url.query.encode())
    try:
        answer = await client.send(
            client.build_request(request.method, url, headers=headers, content=await request.body()), stream=True
        )
    except httpx.TransportError:  # it is starting again
        return Response(status_code=503)
    kept = {name: answer.headers[name] for name in ("Content-Type", "Cache-Control") if name in answer.headers}
    return StreamingResponse(pieces(answer), answer.status_code, kept)


async def pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    except httpx.TransportError:
        pass  # the API was killed: the stream ends here, and the browser comes again with Last-Event-ID
    finally:
        await answer.aclose()


app = Starlette(
    routes=[
        Route("/", page),
        Route("/v1/jobs", jobs, methods=["POST"]),
        Route("/v1/jobs/{job_id}/events", jobs),
    ]
)
