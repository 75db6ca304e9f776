"""Traces as a collector gets them: real processes, the real exporter, OTLP over HTTP; a real kill between two lives of a job."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from chaos.cluster import Cluster
from chaos.place import ClusterOptions
from chaos.processes import wait_until
from service.tracing import life_of, start_tracing, trace_of, wanted

TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CANARY = "zwoelf-kanarienvoegel-7d1e"


class Collector:
    """Of OTLP over HTTP, on loopback: ``spans`` of everything it was sent, each with the name of its service."""

    def __init__(self):
        self.bodies = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                collector.bodies.append(body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def spans(self):
        found = []
        for body in list(self.bodies):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                about = {each.key: each.value.string_value for each in resource.resource.attributes}
                found += [(about["service.name"], span) for scope in resource.scope_spans for span in scope.spans]
        return found

    def named(self, name):
        return [span for _, span in self.spans if span.name == name]

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def attribute(span, name):
    (value,) = (each.value for each in span.attributes if each.key == f"midsentence.{name}")
    return getattr(value, value.WhichOneof("value"))


@pytest.fixture
def collector():
    with contextlib.closing(Collector()) as running:
        yield running


def test_both_lives_of_a_killed_job_arrive_and_are_linked(collector, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with Cluster(tmp_path / "c", ClusterOptions(str(tiny_folder))) as cluster:
        cluster.serve()
        with httpx.Client(base_url=cluster.url, timeout=60, trust_env=False) as client:
            body = {"prompt": CANARY, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
            traceparent = {"traceparent": f"00-{TRACE}-{CLIENT_SPAN}-01"}
            job_id = client.post("/v1/jobs", json=body, headers=traceparent).json()["id"]
            wait_until(lambda: any(attribute(s, "job.id") == job_id for s in collector.named("start job")), 30.0, "the first life")
            cluster.signal("engine", signal.SIGKILL)
            alone = client.post("/v1/jobs", json={"prompt": CANARY, "max_tokens": 2}).json()["id"]
            for each in (job_id, alone):
                wait_until(lambda each=each: client.get(f"/v1/jobs/{each}").json()["finished_at"], 60.0, "the end", pause=0.1)
            text = client.get(f"/v1/jobs/{job_id}").json()["output"]["text"]
        assert cluster.stop() == 0
    (request,) = (span for span in collector.named("POST /v1/jobs") if span.trace_id.hex() == TRACE)
    assert request.parent_span_id.hex() == CLIENT_SPAN
    first, second = sorted(
        (span for span in collector.named("start job") if attribute(span, "job.id") == job_id),
        key=lambda span: attribute(span, "job.fence"),
    )
    for span in (first, second):
        assert span.trace_id.hex() == TRACE
        assert span.parent_span_id == request.span_id
    assert not first.links
    assert [(link.trace_id, link.span_id) for link in second.links] == [(first.trace_id, first.span_id)]
    assert (attribute(first, "job.resumed"), attribute(second, "job.resumed")) == (False, True)
    assert (attribute(first, "job.recoveries"), attribute(second, "job.recoveries")) == (0, 1)
    (run,) = (
        span for span in collector.named("run job") if attribute(span, "job.id") == job_id
    )  # the killed one's is lost with it
    assert run.parent_span_id == second.span_id
    assert attribute(run, "job.outcome") == "completed"
    assert attribute(second, "tokens.logged") + attribute(run, "tokens.generated") == 400
    (other,) = (span for span in collector.named("start job") if attribute(span, "job.id") == alone)
    assert other.trace_id.hex() != TRACE
    assert {service for service, _ in collector.spans} == {"midsentence-api", "midsentence-engine"}
    sent = b"".join(collector.bodies)
    assert CANARY.encode() not in sent
    assert text[20:60].encode() not in sent


def test_jobs_are_given_back_at_a_drain_and_say_so(collector, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    with Cluster(tmp_path / "c", ClusterOptions(str(tiny_folder))) as cluster:
        cluster.serve()
        with httpx.Client(base_url=cluster.url, timeout=60, trust_env=False) as client:
            body = {"prompt": "x y z", "max_tokens": 480, "ignore_eos": True}
            job_id = client.post("/v1/jobs", json=body).json()["id"]
            wait_until(
                lambda: client.get(f"/v1/jobs/{job_id}").json()["usage"]["completion_tokens"] > 5, 30.0, "tokens", pause=0.02
            )
        assert cluster.stop() == 0
    (run,) = collector.named("run job")
    assert attribute(run, "job.outcome") == "released"


def test_an_end_does_not_wait_for_a_collector_that_is_away(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with Cluster(tmp_path / "c", ClusterOptions(str(tiny_folder))) as cluster:
        cluster.serve()
        httpx.post(f"{cluster.url}/v1/jobs", json={"prompt": "x y z", "max_tokens": 3}, trust_env=False).raise_for_status()
        assert cluster.stop(timeout=15.0) == 0


@pytest.mark.parametrize(
    ("variables", "asked"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "mine"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, False),
    ],
)
def test_the_standard_variables_decide(variables, asked):
    assert wanted(variables) is asked


def test_ids_are_functions_of_the_job_and_its_fence():
    assert life_of("job_a", 1) == life_of("job_a", 1)
    assert len({life_of(job, fence) for job in ("job_a", "job_b", "job_a1") for fence in (1, 2, 11)}) == 9
    assert trace_of("job_a") != trace_of("job_b")
    assert 0 < life_of("job_a", 1) < 1 << 64
    assert 0 < trace_of("job_a") < 1 << 128


#: FastAPI, redis-py and transformers take other parts of it by themselves where they are there.
OFF = """
import sys
import service.api.server, service.worker.process
from service.tracing import start_tracing
assert start_tracing("api") is None
assert not [name for name in sys.modules if name.startswith("opentelemetry.exporter")], "imported"
"""

MISSING = """
import sys
sys.modules["opentelemetry.sdk"] = None  # as where it is not installed
from service.cli import main
sys.argv = ["midsentence", "api", "--redis-url", "redis://127.0.0.1:9/0", "--data-dir", sys.argv[1], "--port", "8799"]
main()
"""


def python(code, *arguments, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")} | variables
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment | {"PYTHONPATH": "."}, capture_output=True, text=True, timeout=60)


def test_off_it_is_not_even_imported():
    done = python(OFF)
    assert done.returncode == 0, done.stderr


def test_without_the_extra_it_is_refused_in_words(tmp_path):
    done = python(MISSING, str(tmp_path / "d"), OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 78, done.stderr
    assert "pip install 'midsentence[otel]'" in done.stderr


def test_another_protocol_is_refused_in_words():
    with pytest.raises(Exception, match=r"grpc.*http/protobuf"):
        start_tracing("api", {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
