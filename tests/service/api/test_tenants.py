"""Who may do what: no route is open by mistake, and one tenant's jobs do not exist for another."""

import json
import re
from urllib.parse import unquote

import httpx
import openai
import pytest

from service.api.gate import PUBLIC
from service.api.problems import OPENAI_PATHS
from service.api.static import FILES
from service.api_keys import ApiKeys, add_key
from storage.errors import StoreUnavailable
from tests.service.api.calls import claimed, in_thread
from tests.service.api.conftest import new_memory_store
from tests.service.api.rig import DIRECT, PROMPT, ScriptedEngine, running_api, until


class Tenant(httpx.Client):
    """A client with a key."""

    def __init__(self, api, key):
        super().__init__(base_url=api.url, headers={"Authorization": f"Bearer {key}"}, timeout=20, **DIRECT)
        self.key = key

    def submit(self, **body):
        answer = self.post("/v1/jobs", json={"prompt": PROMPT, "max_tokens": 8, **body})
        assert answer.status_code == 202, answer.text
        return answer.json()["id"]


@pytest.fixture
def keys_file(tmp_path):
    return tmp_path / "api-keys"


@pytest.fixture
def tenants(store, model, keys_file):
    """(api, alice, bob)"""
    given = [add_key(keys_file, name) for name in ("alice", "bob")]
    with running_api(store, model, keys=ApiKeys(keys_file)) as api, Tenant(api, given[0]) as alice, Tenant(api, given[1]) as bob:
        yield api, alice, bob


def paths(router):
    """Of all that the application answers, whatever router brought it."""
    for route in router.routes:
        if hasattr(route, "original_router"):  # FastAPI's mark of an included one
            yield from paths(route.original_router)
        else:
            yield re.sub(r"{[^}]*}", "x", route.path)


def test_every_route_but_the_probes_and_the_dashboards_files_needs_a_key(model, keys_file):
    add_key(keys_file, "alice")
    with running_api(new_memory_store(), model, keys=ApiKeys(keys_file)) as api:
        found = set(paths(api.server.config.app))
        assert {"/livez", "/readyz", "/health", *FILES} == PUBLIC
        assert {"/v1/jobs", "/v1/jobs/x/events", "/v1/completions", "/v1/models/x", "/metrics", "/openapi.json"} <= found
        assert {"/v1/overview", "/v1/overview/events"} <= found
        beside = {"/dashboard/", "/dashboard/..%2fv1/jobs", "/v1/demo/kill-engine", "/livez/", "/LIVEZ", "/livez%2f..%2fv1/jobs"}
        for path in sorted({*found, *beside, "/nowhere"}):
            for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
                for header in ({}, {"Authorization": "Bearer ms-wrong"}, {"Authorization": "Basic eDp5"}):
                    answer = api.client.request(method, path, headers=header)
                    assert (answer.status_code == 401) == (path not in PUBLIC), (method, path, answer.status_code)
                    if answer.status_code == 401 and method != "HEAD":
                        check_refusal(answer, path)


def check_refusal(answer, path):
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    body = answer.json()
    if path.startswith(OPENAI_PATHS):
        assert body["error"].keys() == {"message", "type", "param", "code"}
        assert (body["error"]["type"], body["error"]["code"]) == ("invalid_request_error", "invalid_api_key")
    else:
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert (body["status"], body["code"], body["instance"]) == (401, "invalid_api_key", unquote(path))


def test_the_sdk_sees_its_own_kind_of_error(tenants):
    api, alice, _ = tenants
    wrong = openai.OpenAI(base_url=f"{api.url}/v1", api_key="ms-wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key=alice.key, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]


def test_probes_tell_strangers_that_something_is_wrong_and_not_where_things_are(model, keys_file):
    add_key(keys_file, "alice")
    away = StoreUnavailable("cannot connect to /secret/path")
    with running_api(new_memory_store(), model, away, ApiKeys(keys_file)) as api:
        for path in ("/readyz", "/health"):
            answer = api.client.get(path)
            assert (answer.status_code, list(answer.json()["reasons"])) == (503, ["redis"])
            assert "secret" not in answer.text
        assert api.client.get("/livez").json() == {"live": True}


def test_a_key_is_revoked_without_a_restart(tenants, keys_file):
    _, alice, bob = tenants
    assert alice.get("/v1/jobs").status_code == 200
    keys_file.write_text("".join(line for line in keys_file.read_text().splitlines(keepends=True) if line.startswith("bob ")))
    assert alice.get("/v1/jobs").status_code == 401
    assert bob.get("/v1/jobs").status_code == 200


def test_keys_are_checked_while_the_store_is_away(model, keys_file):
    """An outage of Redis must neither lock the owners of keys out nor let anybody else in."""
    key = add_key(keys_file, "alice")
    away = StoreUnavailable("connection refused")
    with running_api(new_memory_store(), model, away, ApiKeys(keys_file)) as api, Tenant(api, key) as alice:
        assert api.client.get("/v1/jobs").status_code == 401
        assert alice.get("/v1/jobs").status_code == 503
        assert alice.get("/version").status_code == 200


FOREIGN = [
    ("GET", "/v1/jobs/{}"),
    ("POST", "/v1/jobs/{}/cancel"),
    ("GET", "/v1/jobs/{}/events"),
    ("GET", "/v1/jobs/{}/events?after=1"),
]


@pytest.mark.parametrize(("method", "path"), FOREIGN)
def test_another_tenants_job_is_answered_like_one_that_never_was(tenants, store, method, path):
    _, alice, bob = tenants
    job_id = alice.submit()
    unknown = f"job_{'0' * 32}"
    foreign, none = bob.request(method, path.format(job_id)), bob.request(method, path.format(unknown))
    assert (foreign.status_code, none.status_code) == (404, 404)

    def said(answer, its_id):
        hidden = {name: value for name, value in answer.headers.items() if name not in ("x-request-id", "date")}
        body = {name: value for name, value in answer.json().items() if name != "request_id"}
        return str((hidden, body)).replace(its_id, "ID")

    assert said(foreign, job_id) == said(none, unknown)
    assert store.get(job_id).status == "queued"  # untouched
    assert alice.get(f"/v1/jobs/{job_id}").json()["status"] == "queued"


def test_lists_hold_ones_own(tenants):
    _, alice, bob = tenants
    own, others = alice.submit(), bob.submit()
    assert [job["id"] for job in alice.get("/v1/jobs").json()["data"]] == [own]
    assert [job["id"] for job in bob.get("/v1/jobs?status=queued").json()["data"]] == [others]
    # a cursor of one's own list says nothing about whose jobs come next
    assert [job["id"] for job in alice.get("/v1/jobs?cursor=999999").json()["data"]] == [own]


@pytest.fixture
def batch_of_alice(tenants):
    """(ids of file, batch and output file) of a batch that is completed"""
    api, alice, _ = tenants
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": PROMPT}}
    file = alice.post("/v1/files", files={"file": ("n", json.dumps(line))}, data={"purpose": "batch"}).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = alice.post("/v1/batches", json=asked).json()["id"]
    engine = ScriptedEngine(api.source.store)
    engine.write(claimed(engine), end="stop")
    output = alice.get(f"/v1/batches/{batch}").json()["output_file_id"]
    assert alice.get(f"/v1/files/{output}/content").status_code == 200
    return file, batch, output


def test_files_and_batches_of_another_tenant_do_not_exist(tenants, batch_of_alice):
    _, alice, bob = tenants
    file, batch, output = batch_of_alice
    for method, path in (
        ("GET", f"/v1/files/{file}"), ("GET", f"/v1/files/{file}/content"), ("DELETE", f"/v1/files/{file}"),
        ("GET", f"/v1/files/{output}"), ("GET", f"/v1/files/{output}/content"), ("DELETE", f"/v1/files/{output}"),
        ("GET", f"/v1/batches/{batch}"), ("POST", f"/v1/batches/{batch}/cancel"),
    ):  # fmt: skip
        foreign = bob.request(method, path)
        none = bob.request(method, re.sub("[0-9a-f]{32}", "0" * 32, path))
        assert (foreign.status_code, foreign.json()) == (404, none.json())
    made = bob.post("/v1/batches", json={"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"})
    assert (made.status_code, made.json()["error"]["code"]) == (404, "file_not_found")
    for lists in ("/v1/files", "/v1/batches"):
        assert bob.get(lists).json()["data"] == []
        assert bob.get(lists, params={"after": file if "files" in lists else batch}).status_code == 400
        assert len(alice.get(lists).json()["data"]) == 1


def test_upload_keys_of_two_tenants_do_not_meet(tenants):
    _, alice, bob = tenants
    form = {"files": {"file": ("n", b"x")}, "data": {"purpose": "batch"}, "headers": {"Idempotency-Key": "k"}}
    first, other = (client.post("/v1/files", **form).json()["id"] for client in (alice, bob))
    assert first != other


def test_idempotency_keys_of_two_tenants_do_not_meet(tenants):
    _, alice, bob = tenants
    same = {"Idempotency-Key": "k"}
    body = {"prompt": PROMPT, "max_tokens": 8}
    first, other = (client.post("/v1/jobs", json=body, headers=same) for client in (alice, bob))
    again = bob.post("/v1/jobs", json=body, headers=same)
    assert first.json()["id"] != other.json()["id"]
    assert again.json()["id"] == other.json()["id"]
    assert bob.post("/v1/jobs", json={**body, "max_tokens": 9}, headers=same).status_code == 422
    assert alice.post("/v1/completions", json={**body, "model": "tiny", "stream": True}, headers=same).status_code == 422


def test_a_tenants_work_is_done_streamed_and_shown(tenants, store):
    _, alice, _ = tenants
    engine = ScriptedEngine(store)
    answer = in_thread(lambda: alice.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, "max_tokens": 2}))
    completion = claimed(engine)
    engine.write(completion, tokens=2, end="length")
    assert answer().json()["choices"][0]["text"] == "t0 t1 "
    job_id = alice.submit()
    engine.claim_one(job_id)
    engine.write(job_id, tokens=2, end="length")
    assert alice.get(f"/v1/jobs/{job_id}").json()["output"]["text"] == "t0 t1 "
    assert "event: done" in alice.get(f"/v1/jobs/{job_id}/events").text


def test_jobs_without_a_tenant_are_nobodys_once_there_are_keys(store, model, keys_file):
    with running_api(store, model) as api:
        job_id = api.submit()
    key = add_key(keys_file, "alice")
    with running_api(store, model, keys=ApiKeys(keys_file)) as api, Tenant(api, key) as alice:
        assert alice.get(f"/v1/jobs/{job_id}").status_code == 404
    with running_api(store, model) as api:
        assert api.client.get(f"/v1/jobs/{job_id}").status_code == 200


def test_one_tenant_cannot_fill_the_queue(store, model, keys_file):
    given = [add_key(keys_file, name) for name in ("alice", "bob")]
    with (
        running_api(store, model, keys=ApiKeys(keys_file), queue_limit=4, tenant_queue_limit=2) as api,
        Tenant(api, given[0]) as alice,
        Tenant(api, given[1]) as bob,
    ):
        first = alice.submit()
        group = {"model": "tiny", "prompt": PROMPT, "n": 2, "stream": True}
        refused = alice.post("/v1/completions", json=group)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_queue_full")
        alice.submit()
        refused = alice.post("/v1/jobs", json={"prompt": PROMPT})
        assert (refused.status_code, refused.json()["code"]) == (429, "tenant_queue_full")
        assert "--tenant-queue-limit" in refused.json()["detail"]
        bob.submit()
        alice.post(f"/v1/jobs/{first}/cancel")
        alice.submit()


def test_streams_of_one_tenant_are_limited(store, model, keys_file):
    given = [add_key(keys_file, name) for name in ("alice", "bob")]
    with (
        running_api(store, model, keys=ApiKeys(keys_file), tenant_streams=1) as api,
        Tenant(api, given[0]) as alice,
        Tenant(api, given[1]) as bob,
    ):
        events = f"/v1/jobs/{alice.submit()}/events"
        with alice.stream("GET", events) as stream:
            lines = stream.iter_lines()
            assert next(lines) == "event: queued"
            refused = alice.get(events)
            assert (refused.status_code, refused.json()["code"]) == (429, "too_many_streams")
            refused = alice.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT})
            assert refused.status_code == 429
            with bob.stream("GET", f"/v1/jobs/{bob.submit()}/events") as other:
                assert other.status_code == 200
        # what was refused left no job that runs for nobody, and a stream that ends frees its place
        until(lambda: store.counts()["cancelled"] == 1)

        def opens():
            with alice.stream("GET", events) as stream:
                return stream.status_code == 200

        until(opens)
