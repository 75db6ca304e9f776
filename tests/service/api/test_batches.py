"""``/v1/files`` and ``/v1/batches``, as OpenAI's own SDK sees them."""

import json
import threading

import openai
import pytest

from storage.batch_records import CHUNK
from tests.service.api.conftest import new_memory_store
from tests.service.api.rig import MODEL, PROMPT, QUICK, ScriptedEngine, running_api, until

ENDPOINT = "/v1/completions"


def line(custom_id, **body):
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "seed": 1, **body}
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}


def jsonl(*lines):
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def uploaded(sdk, content, name="in.jsonl", **how):
    return sdk.files.create(file=(name, content), purpose="batch", **how)


def started(sdk, content, **values):
    file = uploaded(sdk, content)
    return sdk.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h", **values)


def in_status(sdk, batch, *statuses):
    def look():
        found = sdk.batches.retrieve(batch.id)
        return found if found.status in statuses else None

    return until(look)


def counts(batch):
    return batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed


def lines_of(sdk, file_id):
    return [json.loads(each) for each in sdk.files.content(file_id).text.splitlines()]


class Worker:
    """Finishes every job after two tokens; fails those of which ``fails`` says so."""

    def __init__(self, engine, fails=lambda job_id: False):
        self.engine, self.fails = engine, fails
        self.stop = threading.Event()
        self.ran = []
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        while not self.stop.wait(0.005):
            for job_id in self.engine.claim():
                self.ran.append(job_id)
                if self.fails(job_id):
                    self.engine.fail(job_id, "engine_error", "NaN")
                else:
                    self.engine.write(job_id, tokens=2, end="stop")
                del self.engine.held[job_id]

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join(10)


# --- files ---------------------------------------------------------------------------------------------------------------


def test_a_file_comes_back_as_it_was_sent(sdk):
    content = bytes(range(256)) * (3 * CHUNK // 256) + b"the end"
    file = uploaded(sdk, content, "päth/../of mine.jsonl")
    assert (file.object, file.bytes, file.purpose, file.filename) == ("file", len(content), "batch", "of mine.jsonl")
    assert sdk.files.retrieve(file.id) == file
    assert sdk.files.content(file.id).read() == content


def test_files_are_listed_newest_first_and_page_by_page(sdk):
    made = [uploaded(sdk, b"%d\n" % i).id for i in range(5)]
    assert [file.id for file in sdk.files.list(limit=2)] == made[::-1]
    assert [file.id for file in sdk.files.list(after=made[2])] == [made[1], made[0]]
    assert [file.id for file in sdk.files.list(purpose="batch", limit=1).data] == [made[4]]


def test_a_deleted_file_is_gone(sdk):
    file = uploaded(sdk, b"x\n")
    assert sdk.files.delete(file.id).deleted
    for call in (sdk.files.retrieve, sdk.files.content, sdk.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    assert list(sdk.files.list()) == []


def test_with_a_key_a_file_is_uploaded_once(sdk, store):
    key = {"Idempotency-Key": "k"}
    first = uploaded(sdk, b"x\n", extra_headers=key)
    assert uploaded(sdk, b"x\n", extra_headers=key) == first
    with pytest.raises(openai.UnprocessableEntityError):
        uploaded(sdk, b"y\n", extra_headers=key)
    assert len(sdk.files.list().data) == 1
    assert store.batches.put_chunk("u", 0, b"12345678", limit=10) == "ok", "what the others sent was not dropped"


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"files": {"file": ("n", b"x")}}, "purpose"),
        ({"files": {"file": ("n", b"x")}, "data": {"purpose": "fine-tune"}}, "purpose"),
        ({"files": {"other": ("n", b"x")}, "data": {"purpose": "batch"}}, "other"),
        ({"files": {"file": ("n", b"")}, "data": {"purpose": "batch"}}, "file"),
        ({"files": {"file": ("n", b"x")}, "data": {"purpose": "batch", "expires_after[seconds]": "9"}}, "expires_after[seconds]"),
        ({"files": [("file", ("n", b"x")), ("file", ("n", b"x"))], "data": {"purpose": "batch"}}, "file"),
        ({"files": {"file": (None, b"x")}, "data": {"purpose": "batch"}}, "file"),
    ],
)
def test_a_form_that_is_wrong_names_the_field_and_leaves_nothing(memory_api, form, param):
    answer = memory_api.client.post("/v1/files", **form)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert memory_api.source.store.batches.put_chunk("u", 0, b"x", limit=1) == "ok"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b""),
        ("multipart/form-data; boundary=b", b""),
        ("multipart/form-data; boundary=b", b"no form at all"),
        ("multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nhalf'),
        ("multipart/form-data; boundary=b", b"--b\r\n" + b"X" * 5000 + b": y\r\n\r\n\r\n--b--"),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="p"\r\n\r\n' + b"v" * 5000 + b"\r\n--b--",
        ),
        ("multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name="p%d"\r\n\r\n\r\n' * 20 + b"--b--"),
    ],
)
def test_what_is_no_form_is_refused(memory_api, kind, body):
    answer = memory_api.client.post("/v1/files", content=body, headers={"Content-Type": kind})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_multipart")


def test_files_have_limits_each_and_all_together(model):
    with running_api(new_memory_store(), model, max_file_bytes=CHUNK + 10, max_files_bytes=2 * CHUNK) as api:
        form = {"data": {"purpose": "batch"}}

        def send(size):
            answer = api.client.post("/v1/files", files={"file": ("n", b"x" * size)}, **form)
            return answer.status_code, answer.json().get("error", {}).get("code")

        assert send(2 * CHUNK) == (413, "body_too_large")
        assert send(CHUNK + 10) == (200, None)
        assert send(CHUNK) == (429, "file_store_full")
        assert send(CHUNK - 10) == (200, None)


# --- batches -------------------------------------------------------------------------------------------------------------


def test_a_batch_from_its_file_to_its_output(sdk, engine):
    batch = started(sdk, jsonl(*(line(f"r{i}") for i in range(40))), metadata={"why": "test"})
    assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", ENDPOINT, "24h")
    assert (batch.output_file_id, batch.errors, batch.metadata) == (None, None, {"why": "test"})
    with Worker(engine) as worker:
        done = in_status(sdk, batch, "completed")
    assert counts(done) == (40, 40, 0)
    assert (done.error_file_id, done.failed_at, done.cancelled_at) == (None, None, None)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert len(worker.ran) == len(set(worker.ran)) == 40
    output = lines_of(sdk, done.output_file_id)
    assert [each["custom_id"] for each in output] == [f"r{i}" for i in range(40)]
    assert {each["error"] for each in output} == {None}
    answer = output[7]["response"]
    assert (answer["status_code"], answer["body"]["choices"][0]["text"]) == (200, "t0 t1 ")
    assert answer["body"]["id"] == f"cmpl-{batch.id.removeprefix('batch_')}-8"
    assert answer["request_id"] == output[7]["id"]
    file = sdk.files.retrieve(done.output_file_id)
    assert (file.purpose, file.bytes) == ("batch_output", len(sdk.files.content(file.id).read()))
    assert sdk.files.delete(file.id).deleted
    for call in (sdk.files.retrieve, sdk.files.content, sdk.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    assert sdk.batches.retrieve(batch.id) == done


def test_a_line_may_ask_for_choices_and_may_fail(sdk, engine, store):
    batch = started(sdk, jsonl(line("a", n=3), line("b"), line("c", n=2)))
    with Worker(engine, fails=lambda job_id: job_id.endswith(("-2", "-3-1"))):
        done = in_status(sdk, batch, "completed")
    # "-2" is line b, and the third choice of line a
    assert counts(done) == (3, 0, 3)
    assert done.output_file_id is None
    failed = lines_of(sdk, done.error_file_id)
    assert [each["custom_id"] for each in failed] == ["a", "b", "c"]
    assert failed[1]["response"]["status_code"] == 500
    assert failed[1]["response"]["body"]["error"]["code"] == "engine_error"
    again = started(sdk, jsonl(line("a", n=3)))
    with Worker(engine):
        done = in_status(sdk, again, "completed")
    assert [choice["text"] for choice in lines_of(sdk, done.output_file_id)[0]["response"]["body"]["choices"]] == ["t0 t1 "] * 3


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (b"{no json}", "invalid_json_line", None),
        (b"", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b'{"custom_id":"\xff"}', "invalid_json_line", None),
        (json.dumps(line("first")).encode(), "duplicate_custom_id", "custom_id"),
        (json.dumps({**line("x"), "custom_id": ""}).encode(), "invalid_value", "custom_id"),
        (json.dumps({**line("x"), "method": "GET"}).encode(), "invalid_value", "method"),
        (json.dumps({**line("x"), "url": "/v1/embeddings"}).encode(), "mismatched_url", "url"),
        (json.dumps({**line("x"), "more": 1}).encode(), "unknown_field", "more"),
        (json.dumps({k: v for k, v in line("x").items() if k != "body"}).encode(), "missing_field", "body"),
        (json.dumps(line("x", stream=True)).encode(), "unsupported_value", "body.stream"),
        (json.dumps(line("x", model="other")).encode(), "model_not_found", "body.model"),
        (json.dumps(line("x", temperature=9)).encode(), "invalid_value", "body.temperature"),
        (json.dumps(line("x", prompt=[1] * 600)).encode(), "context_length_exceeded", "body.prompt"),
    ],
)
def test_a_wrong_line_fails_the_batch_before_anything_runs(memory_api, bad, code, param):
    sdk = openai.OpenAI(base_url=f"{memory_api.url}/v1", api_key="none", max_retries=0)
    batch = started(sdk, jsonl(line("first")) + bad + b"\n" + jsonl(line("last")))
    failed = in_status(sdk, batch, "failed")
    assert [(error.line, error.code, error.param) for error in failed.errors.data] == [(2, code, param)]
    assert (failed.errors.object, failed.output_file_id, failed.error_file_id) == ("list", None, None)
    assert memory_api.source.store.jobs(tenant=None).jobs == ()


def test_a_file_of_mistakes_is_not_read_to_its_end(memory_api):
    sdk = openai.OpenAI(base_url=f"{memory_api.url}/v1", api_key="none", max_retries=0)
    failed = in_status(sdk, started(sdk, b"x\n" * 50_000), "failed")
    assert len(failed.errors.data) == 100


def test_a_line_longer_than_a_request_is_named(model):
    with running_api(new_memory_store(), model, max_body_bytes=2000) as api:
        sdk = openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)
        content = jsonl(line("a"), line("b", prompt="x" * 3 * CHUNK), line("c", prompt="y" * 3000), line("d"))
        failed = in_status(sdk, started(sdk, content), "failed")
        assert [(error.line, error.code) for error in failed.errors.data] == [(2, "line_too_long"), (3, "line_too_long")]


def test_no_more_than_a_window_is_under_way(model):
    store = new_memory_store()
    with running_api(store, model, batch_window=3) as api:
        sdk = openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)
        batch = started(sdk, jsonl(*(line(f"r{i}") for i in range(10))))
        engine = ScriptedEngine(store)
        seen = 0
        while seen < 10:
            until(lambda: store.queued("f" * 32))
            assert store.queued("f" * 32) <= 3
            for job_id in engine.claim():
                engine.write(job_id, tokens=1, end="stop")
                del engine.held[job_id]
                seen += 1
        assert counts(in_status(sdk, batch, "completed")) == (10, 10, 0)


def test_whoever_waits_for_an_answer_goes_first(api, sdk, engine, store):
    started(sdk, jsonl(line("a")))
    until(lambda: store.jobs(tenant=None).jobs)
    alone = api.submit()
    assert engine.store.claim("engine-1", engine.incarnation, held=[], free_pages=99, limit=1)[0].job_id == alone


def test_two_apis_on_one_batch_run_each_line_once(store, model, engine):
    with running_api(store, model) as one, running_api(store, model):
        sdk = openai.OpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0)
        batches = [started(sdk, jsonl(*(line(f"r{i}") for i in range(50)))) for _ in range(2)]
        with Worker(engine) as worker:
            done = [in_status(sdk, batch, "completed") for batch in batches]
        assert [counts(each) for each in done] == [(50, 50, 0)] * 2
        assert len(worker.ran) == len(set(worker.ran)) == 100


def test_a_cancelled_batch_keeps_what_is_done(sdk, engine, store):
    batch = started(sdk, jsonl(*(line(f"r{i}") for i in range(300))))
    done = until(engine.claim)[0]
    engine.write(done, tokens=2, end="stop")
    assert sdk.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    ended = in_status(sdk, batch, "cancelled")
    assert counts(ended) == (300, 1, 299)
    assert [each["custom_id"] for each in lines_of(sdk, ended.output_file_id)] == ["r0"]
    rest = lines_of(sdk, ended.error_file_id)
    assert [each["custom_id"] for each in rest] == [f"r{i}" for i in range(1, 300)]
    assert {(each["response"], each["error"]["code"]) for each in rest} == {(None, "batch_cancelled")}
    assert sdk.batches.cancel(batch.id).status == "cancelled"


def test_what_has_ended_cannot_be_cancelled(sdk, engine):
    batch = started(sdk, jsonl(line("a")))
    with Worker(engine):
        in_status(sdk, batch, "completed")
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.batches.cancel(batch.id)
    assert caught.value.code == "batch_not_cancellable"


def test_batches_are_listed_newest_first(sdk):
    made = [started(sdk, jsonl(line("a"))).id for _ in range(3)]
    assert [batch.id for batch in sdk.batches.list(limit=2)] == made[::-1]


def test_with_a_key_a_batch_is_made_once(sdk):
    file, key = uploaded(sdk, jsonl(line("a"))), {"Idempotency-Key": "k"}
    asked = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h", "extra_headers": key}
    first = sdk.batches.create(**asked)
    assert sdk.batches.create(**asked).id == first.id
    with pytest.raises(openai.UnprocessableEntityError):
        sdk.batches.create(**asked, metadata={"a": "b"})


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"input_file_id": "file-" + "0" * 32}, 404, "input_file_id"),
        ({"metadata": {"k": "v" * 513}}, 400, "metadata.k"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, 400, "output_expires_after"),
    ],
)
def test_a_wrong_batch_is_refused_by_its_field(memory_api, change, status, param):
    sdk = openai.OpenAI(base_url=f"{memory_api.url}/v1", api_key="none", max_retries=0)
    body = {"input_file_id": uploaded(sdk, b"x\n").id, "endpoint": ENDPOINT, "completion_window": "24h", **change}
    answer = memory_api.client.post("/v1/batches", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_lines_and_batches_are_counted(api, sdk, engine):
    batch = started(sdk, jsonl(line("a"), line("b")))
    with Worker(engine):
        in_status(sdk, batch, "completed")
    assert api.metric("batch_lines_fed_total") == 2
    until(lambda: api.metric('batches{status="completed"}') == 1)


def test_old_batches_go_with_their_jobs_and_files(model):
    assert QUICK["sweep_interval"] < 0.5
    store = new_memory_store()
    with running_api(store, model, retention_seconds=0.5) as api:
        sdk = openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)
        batch = started(sdk, jsonl(line("a")))
        with Worker(ScriptedEngine(store)):
            until(lambda: store.jobs(tenant=None).jobs)
            until(lambda: not store.jobs(tenant=None).jobs)
        assert list(sdk.files.list()) == list(sdk.batches.list()) == []
        with pytest.raises(openai.NotFoundError):
            sdk.batches.retrieve(batch.id)
