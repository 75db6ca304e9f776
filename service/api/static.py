"""The dashboard's own files. They hold no data, so nobody needs a key for them; what the page then asks for needs one."""

from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import APIRouter
from starlette.responses import Response

#: Nothing but our own files: a text that found its way into the page as markup could load nothing and run nothing.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_FOLDER = resources.files("service") / "dashboard"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def _path_of(name: str) -> str:
    return "/" if name == "index.html" else f"/dashboard/{name}"


#: path -> (content type, content). Read once, with the module: an update that is being installed must not be served by halves.
FILES = {
    _path_of(file.name): (_TYPES[suffix], file.read_bytes())
    for file in _FOLDER.iterdir()
    if (suffix := "." + file.name.rpartition(".")[2]) in _TYPES
}


def static_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for path, (content_type, content) in FILES.items():
        router.get(path)(_answer_with(content_type, content))
        router.head(path)(_answer_with(content_type, content))
    return router


def _answer_with(content_type: str, content: bytes) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return Response(content, media_type=content_type, headers=HEADERS)

    return answer
