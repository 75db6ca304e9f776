"""Who may come in, decided once, before any route is looked for: a new route, or a forgotten one, is closed."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api import static
from service.api.context import Context
from service.api.problems import Unauthorized

#: Probes, which orchestrators call without a key, and the dashboard's files: none of them says anything of any job.
PUBLIC = frozenset({"/livez", "/readyz", "/health", *static.FILES})


class Gate:
    """Names the tenant of each request in ``scope["state"]["tenant"]``. Without keys there is one tenant, the empty name."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app = app
        self._keys = context.keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and scope["path"] not in PUBLIC:
            scope.setdefault("state", {})["tenant"] = self._tenant_of(scope)
        await self._app(scope, receive, send)

    def _tenant_of(self, scope: Scope) -> str:
        if self._keys is None:
            return ""
        tenant = self._keys.tenant_of(Headers(scope=scope).get("Authorization", ""))
        if tenant is None:
            raise Unauthorized("this needs an API key of this server: send it as `Authorization: Bearer KEY`")
        return tenant
