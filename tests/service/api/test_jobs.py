"""Submitting, reading, listing and cancelling jobs; and what is refused, with the field's name."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from storage.errors import StoreMisconfigured
from storage.job_spec import JobSpec
from storage.memory_store import MemoryJobStore
from storage.records import LogRead
from tests.service.api.rig import DIRECT, MODEL, PROMPT, ScriptedEngine, running_api, until


def post(api, body, **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return api.client.post("/v1/jobs", content=content, headers=headers)


def test_a_job_from_submit_to_end(api, store):
    engine = ScriptedEngine(store)
    asked = {
        "prompt": PROMPT, "max_tokens": 8, "seed": 7, "temperature": 0, "top_k": 5, "stop": "END", "priority": 3, "model": MODEL,
        "logit_bias": {"5": -1.5}, "metadata": {"who": "me"}, "deadline_seconds": 60, "logprobs": 2, "ignore_eos": True,
    }  # fmt: skip
    answer = post(api, asked, **{"X-Request-Id": "my-id.1"})
    assert answer.status_code == 202
    job_id = answer.json()["id"]
    assert answer.json() == {"id": job_id, "object": "job", "status": "queued", "model": MODEL, "seed": 7}
    assert answer.headers["Location"] == f"/v1/jobs/{job_id}"
    spec = JobSpec.from_json(store.get(job_id).spec)
    assert spec == JobSpec(
        model=MODEL, max_tokens=8, seed=7, temperature=0.0, top_k=5, stop=("END",), logit_bias={5: -1.5},
        metadata={"who": "me"}, logprobs=2, ignore_eos=True,
    )  # fmt: skip
    engine.claim_one(job_id)
    engine.write(job_id, tokens=7, cached_tokens=3)
    engine.write(job_id, end="stop")
    job = api.job(job_id)
    created = job["created_at"]
    assert list(job) == [
        "id", "object", "status", "model", "usage", "error", "recovery", "created_at", "started_at", "finished_at",
        "deadline_at", "priority", "metadata", "request_id", "group", "output",
    ]  # fmt: skip
    assert created <= job["started_at"] <= job["finished_at"]
    assert job["deadline_at"] == pytest.approx(created + 60)
    assert job["output"]["token_ids"] == list(range(100, 108))
    assert job["output"]["text"] == "t0 t1 t2 t3 t4 t5 t6 t7 "
    assert job["output"]["finish_reason"] == "stop"
    assert job["output"]["logprobs"][0] == {"token": 100, "logprob": -0.5, "top": [[100, -0.5], [7, -1.5]]}
    assert job["usage"] == {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12, "cached_tokens": 3}
    assert job["recovery"] == {"count": 0, "tokens_replayed": 0, "pages_restored": 0}
    assert (job["status"], job["error"], job["priority"], job["request_id"]) == ("completed", None, 3, "my-id.1")
    assert (job["metadata"], job["group"]) == ({"who": "me"}, None)


def test_text_and_chat_prompts(api, store, model):
    text, chat = "the quick brown fox", [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    record = store.get(api.submit(prompt=text))
    assert list(record.prompt_token_ids) == model.tokenization.encode(text)
    for content in ("hi", [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]):
        job_id = post(api, {"messages": [chat[0], {"role": "user", "content": content}], "max_tokens": 4}).json()["id"]
        assert list(store.get(job_id).prompt_token_ids) == model.tokenization.encode_chat(chat)


def test_defaults(api, store):
    first, second = (store.get(post(api, {"prompt": PROMPT}).json()["id"]) for _ in range(2))
    specs = JobSpec.from_json(first.spec), JobSpec.from_json(second.spec)
    assert specs[0].max_tokens == first.max_tokens == 508
    assert (specs[0].temperature, specs[0].top_p, specs[0].ignore_eos) == (1.0, 1.0, False)
    assert specs[0].seed != specs[1].seed


def test_without_max_tokens_a_job_takes_what_the_pool_can_hold(api, store):
    ScriptedEngine(store, device_pages=4)
    until(lambda: api.context.engines_of_model())
    assert store.get(post(api, {"prompt": PROMPT}).json()["id"]).max_tokens == 61


BAD = [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({}, "prompt", "exactly one"),
    ({"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, "prompt", "exactly one"),
    ({"prompt": 5}, "prompt", "token ids"),
    ({"prompt": [1, True]}, "prompt", "integers"),
    ({"prompt": [1, "a"]}, "prompt", "integers"),
    ({"prompt": [1, 1.0]}, "prompt", "integers"),
    ({"prompt": [1, -1]}, "prompt[1]", "vocabulary"),
    ({"prompt": [1, 512]}, "prompt[1]", "0 to 511"),
    ({"prompt": [1] * 512}, "prompt", "512 tokens"),
    ({"prompt": "word " * 2000}, "prompt", "holds 512"),
    ({"prompt": [1] * 100, "max_tokens": 413}, "max_tokens", "513"),
    ({"messages": []}, "messages", "1"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "assistant"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type", "text"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls", "not known"),
    ({"prompt": "a", "max_token": 5}, "max_token", "not known"),
    ({"prompt": "a", "n": 2}, "n", "not known"),
    ({"prompt": "a", "stream": True}, "stream", "not known"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "1"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens", "integer"),
    ({"prompt": "a", "max_tokens": 5.0}, "max_tokens", "integer"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens", "integer"),
    ({"prompt": "a", "temperature": -0.1}, "temperature", "0"),
    ({"prompt": "a", "temperature": "1"}, "temperature", "number"),
    ({"prompt": "a", "temperature": float("nan")}, "temperature", "finite"),
    ({"prompt": "a", "temperature": float("inf")}, "temperature", "finite"),
    ({"prompt": "a", "top_p": 0}, "top_p", "0"),
    ({"prompt": "a", "top_k": -2}, "top_k", "-1"),
    ({"prompt": "a", "min_p": 1.5}, "min_p", "1"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty", "2"),
    ({"prompt": "a", "frequency_penalty": -2.5}, "frequency_penalty", "-2"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"prompt": "a", "logit_bias": {"512": 1}}, "logit_bias", "512"),
    ({"prompt": "a", "logit_bias": {"5": float("nan")}}, "logit_bias.5", "finite"),
    ({"prompt": "a", "min_tokens": 9, "max_tokens": 8}, "min_tokens", "9"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "20"),
    ({"prompt": "a", "logprobs": True}, "logprobs", "integer"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop", "17"),
    ({"prompt": "a", "stop": [""]}, "stop", "1 to"),
    ({"prompt": "a", "stop": [5]}, "stop", "strings"),
    ({"prompt": "a", "ignore_eos": 1}, "ignore_eos", "boolean"),
    ({"prompt": "a", "seed": 1 << 63}, "seed", "less"),
    ({"prompt": "a", "seed": 1.5}, "seed", "integer"),
    ({"prompt": "a", "priority": 101}, "priority", "100"),
    ({"prompt": "a", "deadline_seconds": 0}, "deadline_seconds", "0"),
    ({"prompt": "a", "metadata": {"a": 1}}, "metadata.a", "string"),
    ({"prompt": "a", "metadata": {f"k{i}": "v" for i in range(17)}}, "metadata", "16"),
    ({"prompt": "a", "metadata": {"a": "v" * 513}}, "metadata.a", "512"),
    ({"prompt": "a", "model": 5}, "model", "string"),
    (b'{"prompt": "\\ud83d"}', "prompt", "surrogate"),
    (b'{"prompt": "a", "metadata": {"\\udc00": "x"}}', "metadata", "surrogate"),
    (b'{"prompt": "a", "prompt": "b"}', None, "twice"),
    (b'{"prompt": "a"', None, "not valid JSON"),
    (b"", None, "not valid JSON"),
    (b'"prompt"', None, "JSON object"),
    (b'{"prompt": "\xff"}', None, "not valid JSON"),
    (b'{"a":' * 100_000, None, "nested"),
    (b'{"seed": ' + b"9" * 5000 + b"}", None, "not valid JSON"),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD, ids=lambda value: str(value)[:48])
def test_bad_input_is_refused_with_the_name_of_the_field(refusing_api, body, param, words):
    answer = post(refusing_api, body)
    assert answer.status_code == 400, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    problem = answer.json()
    assert problem["param"] == param
    assert words in problem["detail"]
    assert {"type", "title", "status", "detail", "instance", "code", "request_id"} <= problem.keys()
    if param is not None:
        assert param in problem["detail"]
    assert refusing_api.client.get("/v1/jobs").json()["data"] == []


def test_all_faults_of_a_request_are_listed(refusing_api):
    problem = post(refusing_api, {"prompt": "a", "top_p": 2, "tpo_k": 1}).json()
    assert {error["param"] for error in problem["errors"]} == {"top_p", "tpo_k"}


def test_an_unknown_model_is_not_found(refusing_api):
    answer = post(refusing_api, {"prompt": "a", "model": "gpt-9"})
    assert (answer.status_code, answer.json()["code"], answer.json()["param"]) == (404, "model_not_found", "model")


def test_a_job_larger_than_every_pool_names_the_setting(api, store):
    ScriptedEngine(store, "small", device_pages=2)
    ScriptedEngine(store, "large", device_pages=4)
    until(lambda: len(api.context.engines_of_model()) == 2)
    assert post(api, {"prompt": PROMPT, "max_tokens": 61}).status_code == 202
    answer = post(api, {"prompt": PROMPT, "max_tokens": 62})
    assert (answer.status_code, answer.json()["code"]) == (400, "job_too_large")
    for words in ("--device-pages", "66 tokens", "4 pages of 16"):
        assert words in answer.json()["detail"]


def test_a_body_over_the_limit_is_not_read(store, model):
    with running_api(store, model, max_body_bytes=2000) as api:
        assert post(api, b"x" * 2001).status_code == 413
        sent = []

        def endless():
            for _ in range(1000):
                sent.append(1)
                yield b" " * 1000

        try:
            answer = api.client.post("/v1/jobs", content=endless())
        except httpx.TransportError:  # closed while we were sending: also an answer
            answer = None
        assert answer is None or (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
        assert post(api, json.dumps({"prompt": PROMPT, "max_tokens": 4}).encode().ljust(2000)).status_code == 202


def test_a_full_queue_is_429(store, model):
    with running_api(store, model, queue_limit=2) as api:
        assert [post(api, {"prompt": PROMPT}).status_code for _ in range(2)] == [202, 202]
        answer = post(api, {"prompt": PROMPT})
        assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")
        assert int(answer.headers["Retry-After"]) > 0


# --- idempotency ---------------------------------------------------------------------------------------------------------


def test_a_key_makes_one_job(api):
    key = {"Idempotency-Key": "k-1"}
    first = post(api, {"prompt": PROMPT, "max_tokens": 4}, **key)
    again = post(api, b'{"max_tokens":4,   "prompt":[5,6,7,8]}', **key)
    assert first.json() == again.json()
    assert again.status_code == 202
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    assert again.headers["Location"] == first.headers["Location"]
    other = post(api, {"prompt": PROMPT, "max_tokens": 5}, **key)
    assert (other.status_code, other.json()["code"], other.json()["param"]) == (422, "idempotency_conflict", "Idempotency-Key")
    assert len(api.client.get("/v1/jobs").json()["data"]) == 1
    assert api.metric("idempotent_replays_total") == 1


def test_fifty_at_once_with_one_key_make_one_job(api):
    barrier = threading.Barrier(50)

    def send(_):
        barrier.wait()
        return httpx.post(f"{api.url}/v1/jobs", json={"prompt": PROMPT}, headers={"Idempotency-Key": "same"}, timeout=30, **DIRECT)

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(send, range(50)))
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sum("Idempotent-Replayed" not in answer.headers for answer in answers) == 1
    assert len(api.client.get("/v1/jobs").json()["data"]) == 1


@pytest.mark.parametrize("key", ["", "a b", "x" * 256])
def test_a_bad_key_is_refused(refusing_api, key):
    assert post(refusing_api, {"prompt": PROMPT}, **{"Idempotency-Key": key}).json()["param"] == "Idempotency-Key"


def test_a_submit_whose_reply_was_lost_is_sent_again(model):
    from storage.errors import StoreUnavailable
    from storage.memory_store import MemoryJobStore

    class LosesReplies(MemoryJobStore):
        lost = 0

        def submit(self, *jobs, **limits):
            answer = super().submit(*jobs, **limits)
            if self.lost < 2:
                self.lost += 1
                raise StoreUnavailable("the reply was lost")
            return answer

    store = LosesReplies()
    store.bind(store.create("test"))
    with running_api(store, model) as api:
        answer = post(api, {"prompt": PROMPT}, **{"Idempotency-Key": "k"})
        assert answer.status_code == 202
        assert "Idempotent-Replayed" not in answer.headers
        assert [job["id"] for job in api.client.get("/v1/jobs").json()["data"]] == [answer.json()["id"]]


# --- reading -------------------------------------------------------------------------------------------------------------


def test_jobs_are_listed_filtered_and_paged(api, store):
    ids = [api.submit() for _ in range(7)]
    api.client.post(f"/v1/jobs/{ids[2]}/cancel")
    seen, cursor = [], None
    while True:
        page = api.client.get("/v1/jobs", params={"limit": 3} | ({"cursor": cursor} if cursor else {})).json()
        seen += [job["id"] for job in page["data"]]
        cursor = page["next_cursor"]
        assert page["has_more"] == (cursor is not None)
        if cursor is None:
            break
    assert seen == ids[::-1]
    cancelled = api.client.get("/v1/jobs", params={"status": "cancelled"}).json()["data"]
    assert [job["id"] for job in cancelled] == [ids[2]]
    assert "output" not in cancelled[0]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("status=done", "status"), ("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("limit=1e1", "limit"),
        ("cursor=x", "cursor"), ("state=queued", "state"), ("limit=", "limit"), (f"limit={'9' * 5000}", "limit"),
    ],
)  # fmt: skip
def test_a_bad_query_is_refused(refusing_api, query, param):
    answer = refusing_api.client.get(f"/v1/jobs?{query}")
    assert (answer.status_code, answer.json()["param"]) == (400, param)


def test_a_long_job_is_read_whole(api, store):
    engine = ScriptedEngine(store)
    job_id = api.submit(max_tokens=500)
    engine.claim_one(job_id)
    for _ in range(2):
        engine.write(job_id, tokens=250)
    assert api.job(job_id)["output"]["token_ids"] == list(range(100, 600))
    assert len(store.read([LogRead(job_id)])[0].entries) == 500


def test_cancel_is_at_once_and_may_be_repeated(api, store):
    engine = ScriptedEngine(store)
    job_id = api.submit()
    engine.claim_one(job_id)
    engine.write(job_id, tokens=2)
    for _ in range(2):
        answer = api.client.post(f"/v1/jobs/{job_id}/cancel")
        assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
        assert answer.json()["output"]["token_ids"] == [100, 101]
    assert engine.write(job_id).commits[0] == "terminal"
    finished = api.submit(max_tokens=1)
    engine.claim_one(finished)
    engine.write(finished, end="stop")
    assert api.client.post(f"/v1/jobs/{finished}/cancel").json()["status"] == "completed"


def test_a_passed_deadline_fails_the_job(api):
    job_id = api.submit(deadline_seconds=0.05)
    job = until(lambda: (found := api.job(job_id))["status"] == "failed" and found)
    assert job["error"]["code"] == "deadline_exceeded"


def test_old_jobs_are_purged(model):
    store = MemoryJobStore()
    store.bind(store.create("test"))
    with running_api(store, model, retention_seconds=0.1) as api:
        job_id = api.submit()
        store.cancel(job_id)
        until(lambda: store.get(job_id) is None)
        assert api.client.get(f"/v1/jobs/{job_id}").status_code == 404


def test_after_purges_the_file_is_written_anew_and_a_refusal_stops_nothing(model):
    class Refusing(MemoryJobStore):
        """A managed Redis that keeps the command to itself."""

        asked = 0

        def rewrite_file(self, interval):
            if not super().rewrite_file(interval):
                return False
            self.asked += 1
            raise StoreMisconfigured("Redis refused a command")

    store = Refusing()
    store.bind(store.create("test"))
    with running_api(store, model, retention_seconds=0.1, rewrite_interval=0.2) as api:
        for count in (1, 2):
            job_id = api.submit()
            store.cancel(job_id)
            until(lambda job_id=job_id: store.get(job_id) is None)
            until(lambda count=count: store.asked == count)
