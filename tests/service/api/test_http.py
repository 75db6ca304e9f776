"""What holds for every request: ids, forms of errors, methods, probes. And the table of errors is complete."""

import json
import re

import jsonschema
import pytest
import structlog

import storage.errors
from service.api import problems
from service.api.server import model_names
from service.metrics import ApiMetrics, EngineMetrics
from tests.service.api.rig import PROMPT, ScriptedEngine, until


def subclasses(kind):
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def test_every_error_has_its_own_entry():
    """A new error without one would be answered as an internal error, or as its parent."""
    known = {problems.ApiError, storage.errors.StorageError}
    ours = {kind for root in known for kind in subclasses(root) if kind.__module__ in (problems.__name__, storage.errors.__name__)}
    assert known | ours == set(problems.TABLE)


def test_codes_and_statuses_agree():
    for problem in problems.TABLE.values():
        assert re.fullmatch("[a-z_]+", problem.code)
        # Who is told to come back is told when; who is not, is not.
        assert (problem.retry_after is not None) == (problem.status in (429, 503))
        assert problem.retry_after is None or problem.retry_after <= 120
        # The SDK sends 408, 409, 429 and 5xx again.
        assert problem.status not in (408, 409)


def test_every_tree_is_drawn():
    for kind in problems.TABLE:
        if kind.__module__ == problems.__name__:
            assert kind.__name__ in problems.__doc__


def test_an_unexpected_error_tells_nothing():
    body = problems.problem_body(KeyError("/secret/path"))
    assert (body["status"], body["code"]) == (500, "internal_error")
    assert "secret" not in json.dumps(body)


@pytest.mark.parametrize("given", ["abc", "A.b-c_d:9", "x" * 128])
def test_a_request_id_is_kept(memory_api, given):
    answer = memory_api.client.post("/v1/jobs", json={"prompt": PROMPT}, headers={"X-Request-Id": given})
    assert answer.headers["X-Request-Id"] == given
    assert memory_api.job(answer.json()["id"])["request_id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", 'a"b', "a;b"])
def test_a_bad_request_id_is_replaced(refusing_api, given):
    answer = refusing_api.client.get("/nowhere", headers={"X-Request-Id": given})
    assert re.fullmatch("req_[0-9a-f]{32}", answer.headers["X-Request-Id"])
    assert answer.json()["request_id"] == answer.headers["X-Request-Id"]


def test_the_trace_is_kept_with_the_job(memory_api):
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    for given, kept in ((trace, trace), ("nonsense", "")):
        answer = memory_api.client.post("/v1/jobs", json={"prompt": PROMPT}, headers={"traceparent": given})
        assert memory_api.source.store.get(answer.json()["id"]).traceparent == kept


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/dashboard", 404, "not_found"),
        ("GET", "/v1/job", 404, "not_found"),
        ("POST", "/v1/jobs/job_1/cancel/x", 404, "not_found"),
        ("PUT", "/v1/jobs", 405, "method_not_allowed"),
        ("DELETE", "/v1/jobs/job_1", 405, "method_not_allowed"),
        ("POST", "/livez", 405, "method_not_allowed"),
        ("GET", "/v1/jobs/job_1/cancel", 405, "method_not_allowed"),
        ("GET", "/docs", 404, "not_found"),
    ],
)
def test_what_is_not_there(refusing_api, method, path, status, code):
    answer = refusing_api.client.request(method, path)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.json()["instance"] == path
    assert bool(answer.headers.get("Allow")) == (status == 405)


@pytest.mark.parametrize(
    ("path", "methods"),
    [("/v1/jobs", "GET, POST"), ("/v1/jobs/job_1", "GET"), ("/v1/completions", "POST"), ("/livez", "GET, HEAD")],
)
def test_a_refused_method_is_told_all_that_are_possible(refusing_api, path, methods):
    """``Allow: POST`` stood where GET was possible too: the router names the methods of one route only."""
    assert refusing_api.client.request("DELETE", path).headers["Allow"] == methods


def test_head(refusing_api):
    for path in ("/livez", "/version", "/metrics"):
        answer = refusing_api.client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
    answer = refusing_api.client.head("/v1/jobs")
    assert (answer.status_code, answer.content) == (405, b"")


def test_probes(memory_api):
    assert memory_api.client.get("/livez").json() == {"live": True}
    assert memory_api.client.get("/health").status_code == 503
    assert memory_api.client.get("/readyz").headers["Retry-After"] == "2"
    ScriptedEngine(memory_api.source.store)
    until(lambda: memory_api.client.get("/health").status_code == 200)
    assert memory_api.client.get("/readyz").json() == {"ready": True, "reasons": {}}
    assert memory_api.client.get("/version").json()["model"] == "tiny"


def test_metrics_carry_no_ids(memory_api):
    job_id = memory_api.submit()
    memory_api.job(job_id)
    until(lambda: memory_api.metric('jobs{status="queued"}') == 1)
    text = memory_api.client.get("/metrics").text
    assert job_id not in text
    assert 'midsentence_http_requests_total{code="200",method="GET",route="/v1/jobs/{job_id}"} 1.0' in text


def test_metric_names_are_those_of_the_documents():
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    ApiMetrics(registry)
    EngineMetrics(registry)
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in registry.collect()}
    assert names >= {
        f"midsentence_{name}"
        for name in (
            "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total", "generation_tokens_total",
            "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
            "request_queue_time_seconds", "num_preemptions_total", "prefix_cache_hits_total", "jobs", "recoveries_total",
            "recovery_duration_seconds", "recovery_tokens_replayed_total", "tokens_lost_total", "checkpoint_lag_tokens",
            "page_verify_failures_total", "lease_lost_total", "fenced_writes_rejected_total", "stream_resumes_total",
            "idempotent_replays_total",
        )
    }  # fmt: skip


def test_the_openapi_document_describes_the_bodies(refusing_api):
    document = refusing_api.client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    body = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/JobRequest"}
    assert {"prompt", "messages", "max_tokens", "deadline_seconds"} <= schemas["JobRequest"]["properties"].keys()
    # References once led to ``#/$defs``, where a whole document has nothing.
    references = re.findall(r'"\$ref": "([^"]*)"', json.dumps(document))
    assert {reference.removeprefix("#/components/schemas/") for reference in references} <= schemas.keys()


def test_what_the_document_says_of_a_chat_is_what_the_api_takes(refusing_api):
    """Content as a string, and null for "not given", were accepted and forbidden by the document."""
    document = refusing_api.client.get("/openapi.json").json()
    validator = jsonschema.Draft202012Validator({**document, "$ref": "#/components/schemas/JobRequest"})
    for content in ("hi", [{"type": "text", "text": "hi"}]):
        validator.validate({"messages": [{"role": "user", "content": content}], "temperature": None, "prompt": None})
    assert not validator.is_valid({"messages": [{"role": "user", "content": 5}]})
    assert not validator.is_valid({"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"})


def test_no_prompt_is_logged(memory_api):
    secret = "a-canary-in-the-prompt"
    with structlog.testing.capture_logs() as lines:
        memory_api.client.post("/v1/jobs", json={"prompt": secret, "max_tokens": 4})
        memory_api.client.post("/v1/jobs", json={"prompt": secret, "metadata": {"x": secret}, "top_k": secret})
        memory_api.client.post("/v1/jobs", content=b'{"prompt": "a-canary-in-the-prompt"')
        until(lambda: sum(line["event"] == "request" for line in lines) == 3)
    assert secret not in str(lines)


def test_a_model_is_not_called_by_the_path_of_its_folder(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    file = tmp_path / "weights-q4.gguf"
    file.touch()
    assert model_names(str(folder), folder) == ("my-model", str(folder))
    assert model_names(str(file), tmp_path / "weights-q4-0123") == ("weights-q4", str(file))
    assert model_names("demo", tmp_path / "smollm2-135m-instruct") == ("demo", "smollm2-135m-instruct")
    assert model_names("owner/name", tmp_path / "0123abcd") == ("owner/name",)
