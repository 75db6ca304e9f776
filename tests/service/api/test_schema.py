"""The OpenAPI document is true: schemathesis asks a running api what the document allows and what it forbids, and looks at every
answer: status, content type, shape, methods. What it found is pinned in ``test_http``."""

import json
import threading
import uuid
from contextlib import suppress

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from prometheus_client import CollectorRegistry
from schemathesis.specs.openapi.checks import positive_data_acceptance

from service.api import examples as examples_of
from service.api.app import create_app
from service.api.context import ApiOptions, Context
from storage.errors import EngineDead, StoreUnavailable
from tests.profiles import examples
from tests.service.api.conftest import open_redis_store
from tests.service.api.rig import MODEL, Gone, ScriptedEngine, running_api


def document():
    """Of an app that is never run: the document depends on no store and no model."""
    return create_app(Context(None, lambda: None, ApiOptions(), CollectorRegistry())).openapi()


schema = schemathesis.openapi.from_dict(document())
#: A schema cannot tell what these depend on: vocabulary, context, each other, an earlier request, the log.
BEYOND_A_SCHEMA = (
    "prompt", "messages", "max_tokens", "min_tokens", "logit_bias", "best_of", "stream_options", "after", "Last-Event-ID",
    "ignore_eos", "response_format.json_schema.schema", "response_format.regex", "response_format.grammar",
    "text.format.schema", "text.format.regex", "text.format.grammar",
    "input", "max_output_tokens", "background", "previous_response_id", "starting_after", "response_id", "logprobs",
    "tools", "tool_choice", "top_logprobs", "deadline_seconds", "chat_template_kwargs",
    "file", "endpoint", "n",
)  # fmt: skip


#: With thirty fields that may be left out, a response would be asked for with one of these always, and never be made.
RARELY_RIGHT = (
    "previous_response_id", "max_output_tokens", "min_tokens", "logit_bias", "stream_options", "store", "tools", "tool_choice",
)  # fmt: skip


def usable(case):
    """What no generator guesses: the model's name, a key that is not taken, and what depends on the model or on another field."""
    if case.meta.generation.mode.is_positive:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = MODEL
        if isinstance(case.body, dict) and case.operation.path == "/v1/responses":
            case.body |= dict.fromkeys(case.body.keys() & set(RARELY_RIGHT))
        if "Idempotency-Key" in case.headers:
            case.headers["Idempotency-Key"] = uuid.uuid4().hex
    return case


def acceptance(context, response, case):
    """What the document allows is accepted, or refused for what no document can tell."""
    return None if refused_beyond_a_schema(response) else positive_data_acceptance(context, response, case)


def refused_beyond_a_schema(response):
    if response.status_code not in (400, 422):
        return False
    body = response.json()
    told_by = (body.get("error", body)["param"] or "").startswith(BEYOND_A_SCHEMA)
    return told_by or "valid integer" in response.text  # 13.0 is one to a schema, and not to us, who convert nothing


CHECKS = {"excluded_checks": [positive_data_acceptance], "additional_checks": [acceptance]}


class ImpatientEngine(ScriptedEngine):
    """Ends every job after a token or two, so that no stream and no completion waits."""

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(0.01):
            with suppress(StoreUnavailable):  # a disk that is busy for seconds ends no engine
                try:
                    self.turn()
                except EngineDead:  # nor does a machine that is
                    self.register()

    def turn(self) -> None:
        self.beat()
        self.tell("2.o", "3.P")
        self.claim()
        for job_id in list(self.held):
            with suppress(Gone):
                self.write(job_id, tokens=1)
                self.write(job_id, end="stop")
            del self.held[job_id]


@pytest.fixture(scope="module")
def served(valkey, model):
    store = open_redis_store(valkey)
    stop = threading.Event()
    with running_api(store, model, overview_seconds=0.2) as api, requests.Session() as session:
        session.trust_env = False
        thread = threading.Thread(target=ImpatientEngine(store).run, args=[stop])
        thread.start()
        api.session = session
        yield api
        stop.set()
        thread.join(10)


def test_a_response_deleted_as_soon_as_it_is_made_ends_nothing_else(served):
    """As the links of the document do it: whoever has claimed it finds it gone, and goes on."""
    body = {"model": MODEL, "input": "Tell me.", "background": True}
    for _ in range(100):
        made = served.session.post(f"{served.url}/v1/responses", json=body, timeout=10)
        assert served.session.delete(f"{served.url}/v1/responses/{made.json()['id']}", timeout=10).ok
    assert served.session.post(f"{served.url}/v1/responses", json={**body, "background": False}, timeout=10).ok


@schema.parametrize()
@settings(max_examples=examples(100), suppress_health_check=list(HealthCheck))
def test_the_api_does_what_its_document_says(case, served):
    usable(case).call_and_validate(base_url=served.url, session=served.session, timeout=10, **CHECKS)


def shown():
    """(path, what for, body) of each example."""
    for path, operations in document()["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        for what, example in content.get("application/json", {}).get("examples", {}).items():
            yield path, what, example["value"]


SHOWN = [pytest.param(path, body, id=f"{path}: {what}") for path, what, body in shown()]


@pytest.mark.parametrize(("path", "body"), SHOWN)
def test_what_the_document_shows_is_accepted(served, path, body):
    if "model" in body:
        body = {**body, "model": MODEL}
    if "input_file_id" in body:
        line = {"custom_id": "a", "method": "POST", "url": body["endpoint"], "body": {**examples_of.CHAT["a chat"], "model": MODEL}}
        files = {"file": ("in.jsonl", json.dumps(line))}
        file = served.session.post(f"{served.url}/v1/files", data={"purpose": "batch"}, files=files, timeout=10).json()
        body = {**body, "input_file_id": file["id"]}
    answer = served.session.post(f"{served.url}{path}", json=body, timeout=30)
    assert answer.ok, answer.text


def test_every_endpoint_that_makes_jobs_shows_how():
    assert {path for path, *_ in shown()} == {
        "/v1/jobs", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/batches",
    }  # fmt: skip


LED_TO = {
    "/v1/jobs": {
        ("POST /v1/jobs", 202),
        ("GET /v1/jobs/{job_id}", 200),
        ("POST /v1/jobs/{job_id}/cancel", 200),
        ("GET /v1/jobs/{job_id}/events", 200),
    },
    "/v1/responses": {
        ("POST /v1/responses", 200),
        ("GET /v1/responses/{response_id}", 200),
        ("GET /v1/responses/{response_id}/input_items", 200),
        ("DELETE /v1/responses/{response_id}", 200),
    },
}


@pytest.mark.parametrize("path", LED_TO)
def test_answers_lead_where_the_document_says(served, path):
    """Create, read, stream, cancel: along the links, in any order."""

    class Links(schema.include(path_regex=f"^{path}").as_state_machine()):
        def get_call_kwargs(self, case):
            return {"base_url": served.url, "session": served.session, "timeout": 10}

        def before_call(self, case):
            usable(case)

        def validate_response(self, response, case, additional_checks=None, **kwargs):
            seen.add((case.operation.label, response.status_code))
            case.validate_response(response, transport_kwargs=kwargs, **CHECKS)

    seen = set()
    run_state_machine_as_test(
        Links, settings=settings(max_examples=examples(40), stateful_step_count=8, suppress_health_check=list(HealthCheck))
    )
    assert seen >= LED_TO[path]
