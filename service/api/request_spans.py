"""A span for each request: from its first byte to the last of its answer, so for a stream as long as it was open."""

from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import Scope

from service.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class RequestSpan:
    """Import only where tracing is on. ``traceparent``: names this span to the jobs that the request makes."""

    def __init__(self, tracing: Tracing, scope: Scope, request_id: str) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()
        headers = Headers(scope=scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        self._method = scope["method"]
        self._span: Span = tracing.tracer.start_span(
            scope["method"],
            propagator.extract(carrier),
            SpanKind.SERVER,
            {"http.request.method": scope["method"], "midsentence.request.id": request_id},
        )
        context = self._span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def end(self, route: str, status: int) -> None:
        from opentelemetry.trace import StatusCode

        self._span.update_name(f"{self._method} {route}")
        self._span.set_attributes({"http.route": route, "http.response.status_code": status})
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()
