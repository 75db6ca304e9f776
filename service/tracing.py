"""OpenTelemetry traces (``pip install 'midsentence[otel]'``): off, and never imported, unless the standard OTEL_* variables ask.

A request is a span of the api, under the client's ``traceparent``. A job is spans of the engine under that request's, two for each
*life*: each time it is given to an engine. ``start job`` goes from its place on the device to its first token, ``run job`` from
there to its end. A span is sent when it ends, so a killed engine's ``run job`` never arrives; its ``start job`` did. That span's id
is made from the job's id and fence, so the next life, in whichever engine, can link to it without asking anybody.

Attributes are ids, sizes and states: no prompt, no text, no token.
"""

import hashlib
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from service.errors import SettingsError
from service.version import own_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.trace import Tracer

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_CLOSE_SECONDS = 2.0  #: an end in order must not wait for a collector that is away


def wanted(environ: Mapping[str, str]) -> bool:
    """Whether the variables ask for traces: an OTLP endpoint, or the exporter by name; and nothing that turns them off."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    return exporter == "otlp" or (not exporter and any(environ.get(name) for name in _ENDPOINTS))


class Tracing:
    """One process's way to the collector. ``tracer`` makes spans; the next one gets the ids in ``ids``, if any were chosen."""

    def __init__(self, provider: "TracerProvider", ids: "ChosenIds") -> None:
        self.tracer: Tracer = provider.get_tracer("midsentence", own_version())
        self.ids = ids
        self._provider = provider

    def close(self) -> None:
        """Send what ended, for as long as an orderly end can wait."""
        sending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        sending.start()
        sending.join(_CLOSE_SECONDS)


class ChosenIds:
    """An IdGenerator whose next span in this thread gets the ids that were chosen for it. No subclass: nothing is imported."""

    def __init__(self) -> None:
        self._chosen = threading.local()

    def choose(self, trace_id: int, span_id: int) -> None:
        self._chosen.ids = (trace_id, span_id)

    def generate_trace_id(self) -> int:
        return self._next()[0]

    def generate_span_id(self) -> int:
        ids = self._next()
        self._chosen.ids = None  # the SDK asks for the span's id last
        return ids[1]

    def is_trace_id_random(self) -> bool:
        return True

    def _next(self) -> tuple[int, int]:
        ids: tuple[int, int] | None = getattr(self._chosen, "ids", None)
        return ids or (_number(os.urandom(16)), _number(os.urandom(8)))


def start_tracing(process: str, environ: Mapping[str, str] = os.environ) -> Tracing | None:
    """None when nobody asked. Raises SettingsError where traces are asked for and cannot be sent."""
    if not wanted(environ):
        return None
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        raise SettingsError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}", "traces are sent as http/protobuf only: unset it")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(
            f"the OTEL_* variables ask for traces, and OpenTelemetry is not installed: {error}",
            "pip install 'midsentence[otel]', or set OTEL_SDK_DISABLED=true",
        ) from None

    ids = ChosenIds()
    name = {} if environ.get("OTEL_SERVICE_NAME") else {"service.name": f"midsentence-{process}"}
    resource = Resource.create({**name, "service.version": own_version()})
    provider = TracerProvider(resource=resource, id_generator=cast("IdGenerator", ids), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider, ids)


def trace_of(job_id: str) -> int:
    """The trace of a job whose client sent none and whose api traced nothing."""
    return _number(hashlib.blake2b(job_id.encode(), digest_size=16, person=b"trace").digest())


def life_of(job_id: str, fence: int) -> int:
    """The span id of a job's ``start job`` in the life that this fence began."""
    return _number(hashlib.blake2b(f"{job_id} {fence}".encode(), digest_size=8, person=b"life").digest())


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big") or 1  # zero is no id
