"""``/v1/completions`` and ``/v1/models``, as OpenAI's own SDK and a plain client see them."""

import json
import threading

import httpx
import openai
import pytest

from storage.job_spec import JobSpec
from tests.service.api.calls import claimed, in_thread
from tests.service.api.rig import DIRECT, MODEL, PROMPT, running_api, until


def test_a_whole_answer(sdk, engine, store):
    wait = in_thread(lambda: sdk.completions.create(model=MODEL, prompt=PROMPT, seed=3, max_tokens=3, temperature=0))
    job_id = claimed(engine)
    engine.write(job_id, tokens=2, cached_tokens=1)
    engine.write(job_id, end="length")
    answer = wait()
    assert answer.id == job_id
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [(0, "t0 t1 t2 ", "length")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 3, 7)
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert JobSpec.from_json(store.get(job_id).spec).kind == "completion"


def test_a_streamed_answer(sdk, engine):
    stream = sdk.completions.create(
        model=MODEL, prompt="once upon", max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    job_id = claimed(engine)
    engine.write(job_id, tokens=3, texts=["a", "", "b"])
    engine.write(job_id, end="stop")
    chunks = list(stream)
    assert [chunk.choices[0].text for chunk in chunks[:-1]] == ["a", "b", "t3 ", ""]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, None, "stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 4)
    assert {chunk.id for chunk in chunks} == {job_id}


def test_the_bytes_of_a_stream(api, engine):
    """``[DONE]`` at the end; no ``id:`` or ``retry:``, after which the SDK takes a keep-alive for an event."""
    body = {"model": MODEL, "prompt": PROMPT, "stream": True, "max_tokens": 2}
    wait = in_thread(lambda: api.client.post("/v1/completions", json=body))
    engine.write(claimed(engine), tokens=2, end="stop")
    answer = wait()
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert "usage" not in json.loads(lines[0].removeprefix("data: "))


def test_keep_alive_does_not_disturb_the_sdk(store, model, engine):
    with running_api(store, model, keep_alive=0.02) as api:
        client = openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(model=MODEL, prompt=PROMPT, stream=True)
        job_id = claimed(engine)
        threading.Timer(0.2, lambda: engine.write(job_id)).start()
        threading.Timer(0.4, lambda: engine.write(job_id, end="stop")).start()
        assert "".join(chunk.choices[0].text for chunk in stream) == "t0 t1 "
        client.close()


def test_extensions_and_defaults(api, store, engine):
    extra = {"ignore_eos": True, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "logit_bias": {"7": 1}}
    extra |= {"priority": -3, "deadline_seconds": 60}
    wait = in_thread(lambda: api.client.post("/v1/completions", json={"model": MODEL, "prompt": [PROMPT], **extra}))
    job_id = claimed(engine)
    spec = JobSpec.from_json(store.get(job_id).spec)
    assert (spec.max_tokens, spec.ignore_eos, spec.top_k, spec.min_p, spec.min_tokens) == (16, True, 0, 0.1, 2)
    assert (spec.repetition_penalty, spec.logit_bias) == (1.1, {7: 1.0})
    assert (store.get(job_id).priority, store.get(job_id).deadline_at is not None) == (-3, True)
    engine.write(job_id, end="length")
    assert wait().status_code == 200


def test_legacy_logprobs(sdk, engine, model):
    wait = in_thread(lambda: sdk.completions.create(model=MODEL, prompt=PROMPT, logprobs=2))
    engine.write(claimed(engine), tokens=2, end="stop")
    found = wait().choices[0].logprobs
    shown = [model.tokenization.token_text(token) for token in (100, 101, 7)]
    assert found.tokens == shown[:2]
    assert found.token_logprobs == [-0.5, -0.5]
    assert found.top_logprobs == [{shown[0]: -0.5, shown[2]: -1.5}, {shown[1]: -0.5, shown[2]: -1.5}]
    assert found.text_offset == [0, 3]


BAD = [
    ({"prompt": "a"}, "model", 400),
    ({"model": MODEL}, "prompt", 400),
    ({"model": "gpt-9", "prompt": "a"}, "model", 404),
    ({"model": MODEL, "prompt": "a", "n": 0}, "n", 400),
    ({"model": MODEL, "prompt": "a", "n": 17}, "n", 400),
    ({"model": MODEL, "prompt": "a", "n": True}, "n", 400),
    ({"model": MODEL, "prompt": "a", "best_of": 2}, "best_of", 400),
    ({"model": MODEL, "prompt": "a", "n": 2, "best_of": 3}, "best_of", 400),
    ({"model": MODEL, "prompt": "a", "echo": True, "logprobs": 0}, "logprobs", 400),
    ({"model": MODEL, "prompt": "a", "suffix": "x"}, "suffix", 400),
    ({"model": MODEL, "prompt": ["a", ""]}, "prompt[1]", 400),
    ({"model": MODEL, "prompt": [["a"], "b"]}, "prompt[0]", 400),
    ({"model": MODEL, "prompt": ["a", 5]}, "prompt[1]", 400),
    ({"model": MODEL, "prompt": [[1], [2, 999_999]]}, "prompt[1][1]", 400),
    ({"model": MODEL, "prompt": ["a", [5] * 400], "max_tokens": 200}, "max_tokens", 400),
    ({"model": MODEL, "prompt": ["a", [5] * 600]}, "prompt[1]", 400),
    ({"model": MODEL, "prompt": ["a"] * 129}, "prompt", 400),
    ({"model": MODEL, "prompt": ["a"] * 9, "n": 15}, "n", 400),
    ({"model": MODEL, "prompt": []}, "prompt", 400),
    ({"model": MODEL, "prompt": ""}, "prompt", 400),
    ({"model": MODEL, "prompt": "a", "tools": []}, "tools", 400),
    ({"model": MODEL, "prompt": "a", "max_tokens": 0}, "max_tokens", 400),
    ({"model": MODEL, "prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", 400),
    ({"model": MODEL, "prompt": "a", "temperature": float("nan")}, "temperature", 400),
]


@pytest.mark.parametrize(("body", "param", "status"), BAD, ids=lambda value: str(value)[:60])
def test_errors_have_openais_shape(refusing_api, body, param, status):
    answer = refusing_api.client.post("/v1/completions", content=json.dumps(body))
    assert answer.status_code == status
    error = answer.json()["error"]
    assert list(answer.json()) == ["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert isinstance(error["code"], str)


def test_nulls_are_as_good_as_nothing(api, engine):
    nothing = dict.fromkeys(["suffix", "stop", "seed", "user", "logprobs", "logit_bias", "n", "best_of", "echo", "max_tokens"])
    wait = in_thread(lambda: api.client.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, **nothing}))
    engine.write(claimed(engine), end="stop")
    assert wait().status_code == 200


def test_other_methods_and_paths_have_openais_shape(refusing_api):
    answer = refusing_api.client.get("/v1/completions")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert answer.headers["Allow"] == "POST"
    assert refusing_api.client.get("/v1/models/none").json()["error"]["code"] == "model_not_found"


def test_models(api, sdk):
    assert [model.id for model in sdk.models.list()] == [MODEL]
    assert sdk.models.retrieve(MODEL).owned_by == "midsentence"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("other/model")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_failed_job_is_an_error(sdk, engine, streamed):
    wait = in_thread(lambda: list(sdk.completions.create(model=MODEL, prompt=PROMPT, stream=streamed)))
    engine.fail(claimed(engine), "poison", "three crashes")
    with pytest.raises(openai.APIError, match="three crashes"):
        wait()


def test_a_cancelled_job_is_an_error_that_is_not_sent_again(api, sdk, engine):
    wait = in_thread(lambda: sdk.completions.create(model=MODEL, prompt=PROMPT))
    api.client.post(f"/v1/jobs/{claimed(engine)}/cancel")
    with pytest.raises(openai.BadRequestError) as caught:
        wait()
    assert caught.value.code == "job_cancelled"


@pytest.mark.parametrize("streamed", [False, True])
def test_when_its_client_goes_away_a_plain_completion_is_cancelled(api, store, engine, streamed):
    def leave():
        with httpx.Client(**DIRECT, timeout=0.5) as client:
            client.post(f"{api.url}/v1/completions", json={"model": MODEL, "prompt": PROMPT, "stream": streamed})

    wait = in_thread(leave)
    job_id = claimed(engine)
    assert store.get(job_id).served_by == api.context.incarnation
    with pytest.raises(httpx.TimeoutException):
        wait()
    until(lambda: store.get(job_id).status == "cancelled")


def test_a_job_goes_on_without_its_clients(api, store, engine):
    job_id = api.submit()
    with api.client.stream("GET", f"/v1/jobs/{job_id}/events") as response:
        next(response.iter_lines())
    engine.claim_one(job_id)
    engine.write(job_id, end="stop")
    assert store.get(job_id).served_by == ""
    assert api.job(job_id)["status"] == "completed"


def test_with_a_key_a_completion_can_be_fetched_again(api, store, engine):
    """The SDK sends POSTs again after a broken connection; with a key that is the same job, and nothing is lost."""
    body, key = {"model": MODEL, "prompt": PROMPT}, {"Idempotency-Key": "again"}
    with httpx.Client(**DIRECT, timeout=0.3) as client, pytest.raises(httpx.TimeoutException):
        client.post(f"{api.url}/v1/completions", json=body, headers=key)
    job_id = claimed(engine)
    wait = in_thread(lambda: api.client.post("/v1/completions", json=body, headers=key))
    engine.write(job_id, tokens=2, end="stop")
    answer = wait()
    assert (answer.json()["id"], answer.headers["Idempotent-Replayed"]) == (job_id, "true")
    assert answer.json()["choices"][0]["text"] == "t0 t1 "
    streamed = api.client.post("/v1/completions", json={**body, "stream": True}, headers=key)
    assert streamed.status_code == 422


def test_ten_completions_at_once(sdk, engine):
    waits = [in_thread(lambda: sdk.completions.create(model=MODEL, prompt=PROMPT)) for _ in range(10)]
    until(lambda: engine.claim() or len(engine.held) == 10)
    until(lambda: engine.claim() or len(engine.held) == 10)
    while len(engine.held) < 10:
        engine.claim()
    for _ in range(5):
        engine.write(*engine.held)
    engine.write(*engine.held, end="stop")
    assert {wait().choices[0].text for wait in waits} == {"t0 t1 t2 t3 t4 t5 "}
