"""``/v1/responses`` as OpenAI's own SDK and a plain client see it: what is made, found again, gone on with, ended and deleted."""

import json
import threading

import httpx
import openai
import pytest

from service.api_keys import ApiKeys, add_key
from storage.job_spec import JobSpec
from storage.records import LogRead
from tests.service.api.calls import claimed, in_thread
from tests.service.api.conftest import new_memory_store
from tests.service.api.rig import DIRECT, MODEL, ScriptedEngine, running_api, until


def background(sdk, **more):
    return sdk.responses.create(**{"model": MODEL, "input": "hello", "background": True, **more})


def finished(sdk, engine, tokens=3, end="stop", **more):
    """A background response that has ended."""
    made = background(sdk, **more)
    engine.claim_one(made.id)
    engine.write(made.id, tokens=tokens, end=end)
    return sdk.responses.retrieve(made.id)


def prompt_of(store, model, response_id):
    """The text that the engine is given."""
    return "".join(model.tokenization.token_text(token) for token in store.get(response_id).prompt_token_ids)


# --- whole ---------------------------------------------------------------------------------------------------------------


def test_a_whole_response(sdk, engine, store):
    wait = in_thread(lambda: sdk.responses.create(model=MODEL, input="hello", max_output_tokens=3, temperature=0, top_p=0.5))
    job_id = claimed(engine)
    engine.write(job_id, tokens=2, cached_tokens=1)
    engine.write(job_id, end="length")
    response = wait()
    prompt = len(store.get(job_id).prompt_token_ids)
    assert (response.id, response.object, response.model) == (job_id, "response", MODEL)
    assert response.id.startswith("resp_")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output_text == "t0 t1 t2 "
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert message.id == f"msg_{job_id.removeprefix('resp_')}"
    assert response.usage.to_dict() == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 1},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 3,
    }
    assert (response.temperature, response.top_p, response.max_output_tokens, response.background) == (0, 0.5, 3, False)
    assert (response.tools, response.tool_choice, response.parallel_tool_calls, response.error) == ([], "auto", True, None)
    assert sdk.responses.retrieve(job_id) == response
    record = store.get(job_id)
    assert record.served_by, "it ends with its api, for its client cannot know its id"


def test_what_cannot_change_the_text_is_given_back(sdk, engine):
    told = {
        "instructions": "be brief",
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "parallel_tool_calls": False,
        "max_tool_calls": 4,
        "truncation": "disabled",
        "tool_choice": "none",
        "top_logprobs": 2,
        "store": True,
    }
    response = finished(sdk, engine, service_tier="auto", text={"format": {"type": "text"}}, **told).to_dict()
    assert {name: response[name] for name in told} == told
    assert (response["service_tier"], response["text"]["format"]) == ("default", {"type": "text"})
    assert isinstance(response["seed"], int)


def test_a_format_is_the_jobs_grammar_and_is_given_back(sdk, store):
    shape = {
        "type": "json_schema",
        "name": "person",
        "strict": True,
        "schema": {"type": "object", "properties": {"age": {"type": "integer"}}},
    }
    response = background(sdk, text={"format": shape})
    assert response.to_dict()["text"]["format"] == shape
    assert "age" in JobSpec.from_json(store.get(response.id).spec).grammar


def test_sampling_fields_of_the_native_api(sdk, store):
    extra = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "seed": 9, "stop": ["x"], "ignore_eos": True,
        "priority": 3, "logit_bias": {"7": 1},
    }  # fmt: skip
    record = store.get(background(sdk, extra_body=extra).id)
    spec = JobSpec.from_json(record.spec)
    assert (spec.top_k, spec.min_p, spec.repetition_penalty, spec.min_tokens, spec.seed) == (5, 0.1, 1.1, 2, 9)
    assert (spec.stop, spec.ignore_eos, spec.logit_bias, record.priority) == (("x",), True, {7: 1.0}, 3)


def test_logprobs_where_they_are_asked_for(sdk, engine, model):
    asked = finished(sdk, engine, tokens=2, include=["message.output_text.logprobs"], top_logprobs=2)
    shown = [model.tokenization.token_text(token) for token in (100, 101, 7)]
    first, second = asked.output[0].content[0].logprobs
    assert [first.token, second.token] == shown[:2]
    assert (first.logprob, shown[0], first.bytes) == (-0.5, "\ufffd", [164]), "the bytes of a part of a character"
    assert bytes(first.top_logprobs[1].bytes).decode() == shown[2]
    assert [(top.token, top.logprob) for top in second.top_logprobs] == [(shown[1], -0.5), (shown[2], -1.5)]
    assert finished(sdk, engine, top_logprobs=2).output[0].content[0].logprobs == []


def test_messages_become_the_chat_that_templates_know(sdk, store, model):
    made = background(
        sdk,
        instructions="be brief",
        input=[
            {"role": "developer", "content": "and kind"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
            {"role": "user", "content": "d"},
        ],
    )
    assert prompt_of(store, model, made.id) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>system\nand kind<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
        "<|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_response_can_be_sent_back_as_input(sdk, engine, store, model):
    before = finished(sdk, engine, include=["message.output_text.logprobs"])
    made = background(sdk, input=[{"role": "user", "content": "hello"}, *before.output, {"role": "user", "content": "more"}])
    assert "<|im_start|>assistant\nt0 t1 t2 <|im_end|>" in prompt_of(store, model, made.id)


def test_a_response_that_fails_says_so_and_is_not_made_again(sdk, engine):
    wait = in_thread(lambda: sdk.responses.create(model=MODEL, input="a"))
    job_id = claimed(engine)
    engine.write(job_id)
    engine.fail(job_id, "poison", "three crashes")
    response = wait()
    assert (response.status, response.error.code, response.error.message) == ("failed", "server_error", "poison: three crashes")
    assert (response.output_text, response.output[0].status) == ("t0 ", "incomplete")


# --- in the background ---------------------------------------------------------------------------------------------------


def test_a_background_response_is_polled(sdk, engine):
    made = background(sdk)
    assert (made.status, made.output, made.usage, made.background) == ("queued", [], None, True)
    engine.claim_one(made.id)
    engine.write(made.id, tokens=2)
    running = sdk.responses.retrieve(made.id)
    assert (running.status, running.output_text, running.output[0].status) == ("in_progress", "t0 t1 ", "in_progress")
    assert (running.usage, running.completed_at) == (None, None)
    engine.write(made.id, end="stop")
    done = sdk.responses.retrieve(made.id)
    assert (done.status, done.output_text, done.output[0].status) == ("completed", "t0 t1 t2 ", "completed")
    assert done.completed_at >= done.created_at == made.created_at


def test_a_recovery_shows(sdk, engine):
    made = background(sdk)
    engine.claim_one(made.id)
    engine.write(made.id)
    engine.register()
    engine.write(made.id, end="stop", tokens_replayed=1, pages_restored=2)
    shown = sdk.responses.retrieve(made.id).to_dict()["recovery"]
    assert shown == {"count": 1, "tokens_replayed": 1, "pages_restored": 2}


def test_a_background_response_goes_on_without_its_client(sdk, engine, store):
    stream = background(sdk, stream=True)
    response_id = next(iter(stream)).response.id
    stream.close()
    engine.claim_one(response_id)
    engine.write(response_id, end="stop")
    assert sdk.responses.retrieve(response_id).status == "completed"
    assert store.get(response_id).served_by == ""


def test_cancelling_twice_is_fine(sdk, engine):
    made = background(sdk)
    engine.claim_one(made.id)
    engine.write(made.id)
    first = sdk.responses.cancel(made.id)
    assert (first.status, first.output_text, first.error) == ("cancelled", "t0 ", None)
    assert sdk.responses.cancel(made.id) == first == sdk.responses.retrieve(made.id)


def test_a_foreground_response_is_not_cancellable(sdk, engine):
    wait = in_thread(lambda: sdk.responses.create(model=MODEL, input="a"))
    job_id = claimed(engine)
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.responses.cancel(job_id)
    assert caught.value.code == "not_cancellable"
    engine.write(job_id, end="stop")
    assert wait().status == "completed"


def test_a_background_response_of_which_no_client_heard_is_cancelled(store, model):
    """It was answered with 429, after which the SDK sends the request again."""
    with running_api(store, model, tenant_streams=0) as api:
        answer = api.client.post("/v1/responses", json={"input": "a", "background": True, "stream": True})
        assert answer.status_code == 429
        (record,) = store.jobs().jobs
        until(lambda: store.get(record.job_id).status == "cancelled")


# --- in the foreground ---------------------------------------------------------------------------------------------------


def leave(api, **body):
    """A client that goes away after half a second, and an api that has noticed."""
    headers = body.pop("headers", {})
    with httpx.Client(**DIRECT, timeout=0.5) as client, pytest.raises(httpx.TimeoutException):
        client.post(f"{api.url}/v1/responses", json={"input": "a", **body}, headers=headers)
    until(lambda: 'method="POST",route="/v1/responses"' in api.client.get("/metrics").text)


@pytest.mark.parametrize("streamed", [False, True])
def test_when_its_client_goes_away_a_plain_response_is_cancelled(api, sdk, store, streamed):
    leave(api, stream=streamed)
    job_id = store.jobs().jobs[0].job_id
    until(lambda: store.get(job_id).status == "cancelled")
    assert sdk.responses.retrieve(job_id).status == "cancelled"


def test_with_a_key_the_same_request_gets_the_same_response(api, engine, store):
    body, key = {"input": "a"}, {"Idempotency-Key": "again"}
    leave(api, headers=key)
    job_id = claimed(engine)
    wait = in_thread(lambda: api.client.post("/v1/responses", json=body, headers=key))
    engine.write(job_id, tokens=2, end="stop")
    answer = wait()
    assert (answer.json()["id"], answer.headers["Idempotent-Replayed"]) == (job_id, "true")
    assert api.client.post("/v1/responses", json={"input": "b"}, headers=key).status_code == 422


def test_the_same_background_request_gets_the_same_response(api, sdk):
    body, key = {"input": "a", "background": True}, {"Idempotency-Key": "again"}
    first, second = (api.client.post("/v1/responses", json=body, headers=key) for _ in range(2))
    assert first.json() == second.json()
    assert ("Idempotent-Replayed" in first.headers, second.headers["Idempotent-Replayed"]) == (False, "true")


def test_a_stream_that_a_drained_api_breaks_off_goes_on_elsewhere(store, model, engine):
    """The api ends, not the client: it knows the id and asks the next api."""
    with running_api(store, model) as api, openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.responses.create(model=MODEL, input="a", stream=True)
        response_id = next(iter(stream)).response.id
        api.drain()
        seen = [event.sequence_number for event in stream]
        api.thread.join(10)
    assert seen == [1]
    assert store.get(response_id).status == "queued"
    engine.claim_one(response_id)
    engine.write(response_id, end="stop")
    with running_api(store, model) as api, openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        rest = list(client.responses.retrieve(response_id, stream=True, starting_after=seen[-1]))
        assert (rest[0].sequence_number, rest[-1].type) == (2, "response.completed")


# --- what is not stored --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_what_is_not_stored_is_deleted_once_answered(api, sdk, store, engine, streamed):
    def ask():
        made = sdk.responses.create(model=MODEL, input="a", store=False, stream=streamed)
        return list(made)[-1].response if streamed else made

    wait = in_thread(ask)
    job_id = claimed(engine)
    for answer in (api.client.get(f"/v1/responses/{job_id}"), api.client.get(f"/v1/responses/{job_id}/input_items")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found")
    engine.write(job_id, end="stop")
    response = wait()
    assert (response.id, response.output_text, response.to_dict()["store"]) == (job_id, "t0 ", False)
    until(lambda: store.get(job_id) is None)


@pytest.mark.parametrize("streamed", [False, True])
def test_what_is_not_stored_is_deleted_when_its_client_goes_away(api, store, engine, streamed):
    leave(api, store=False, stream=streamed)
    until(lambda: not store.jobs().jobs)


def test_what_is_not_stored_but_has_a_key_is_deleted_when_it_was_answered(api, store, engine):
    body, key = {"input": "a", "store": False}, {"Idempotency-Key": "again"}
    leave(api, store=False, headers=key)
    job_id = claimed(engine)
    engine.write(job_id, end="stop")
    assert api.client.post("/v1/responses", json=body, headers=key).json()["id"] == job_id
    until(lambda: store.get(job_id) is None)


# --- conversations -------------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on(sdk, engine, store, model):
    first = finished(sdk, engine, instructions="be brief")
    second = finished(sdk, engine, input="more", previous_response_id=first.id, instructions="be long")
    assert second.previous_response_id == first.id
    assert prompt_of(store, model, second.id) == (
        "<|im_start|>system\nbe long<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nt0 t1 t2 <|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )
    sdk.responses.delete(first.id)
    third = background(sdk, input="and", previous_response_id=second.id)
    text = prompt_of(store, model, third.id)
    assert "system" not in text
    assert text.count("t0 t1 t2 ") == 2


def test_a_response_that_was_cancelled_before_it_said_anything_left_nothing_to_go_on_from(sdk, store, model):
    silent = sdk.responses.cancel(background(sdk).id)
    made = background(sdk, input="more", previous_response_id=silent.id)
    assert prompt_of(store, model, made.id) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_input_items_of_a_conversation(sdk, engine):
    first = finished(sdk, engine)
    made = background(
        sdk, input=[{"role": "user", "content": "b"}, {"role": "user", "content": "c"}], previous_response_id=first.id
    )
    items = list(sdk.responses.input_items.list(made.id, order="asc", include=["message.output_text.logprobs"]))
    assert [(item.role, item.content[0].text) for item in items] == [
        ("user", "hello"), ("assistant", "t0 t1 t2 "), ("user", "b"), ("user", "c"),
    ]  # fmt: skip
    assert items[1].id == first.output[0].id
    assert len({item.id for item in items}) == 4
    newest = sdk.responses.input_items.list(made.id, limit=3)
    assert ([item.id for item in newest.data], newest.has_more) == ([item.id for item in items[:0:-1]], True)
    rest = sdk.responses.input_items.list(made.id, limit=3, after=newest.last_id)
    assert ([item.id for item in rest.data], rest.has_more) == ([items[0].id], False)
    assert [item.id for item in sdk.responses.input_items.list(made.id, limit=1)] == [item.id for item in reversed(items)]


def test_only_what_has_ended_and_is_stored_can_be_gone_on_with(sdk, api, engine, store):
    running = background(sdk)
    job_id = api.submit()
    for previous, code in (
        (running.id, "invalid_value"),
        ("resp_none", "previous_response_not_found"),
        (job_id, "previous_response_not_found"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            background(sdk, previous_response_id=previous)
        assert (caught.value.param, caught.value.code) == ("previous_response_id", code)


def test_a_conversation_ends_where_the_context_does(sdk, engine):
    first = finished(sdk, engine, input="word " * 60)
    with pytest.raises(openai.BadRequestError) as caught:
        background(sdk, input="word " * 450, previous_response_id=first.id)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as caught:
        background(sdk, max_output_tokens=100_000)
    assert (caught.value.param, caught.value.code) == ("max_output_tokens", "context_length_exceeded")


# --- the end -------------------------------------------------------------------------------------------------------------


def test_delete(sdk, api, engine, store):
    done, running = finished(sdk, engine), background(sdk)
    for response in (done, running):
        answer = api.client.delete(f"/v1/responses/{response.id}")
        assert answer.json() == {"id": response.id, "object": "response", "deleted": True}
        assert store.read([LogRead(response.id)]) == [None]
        for call in (sdk.responses.retrieve, sdk.responses.delete, sdk.responses.cancel, sdk.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                call(response.id)


def test_another_kind_of_job_is_no_response(sdk, api):
    job_id = api.submit()
    for call in (sdk.responses.retrieve, sdk.responses.delete, sdk.responses.cancel, sdk.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(job_id)
    assert api.job(job_id)["status"] == "queued"


def test_another_tenants_response_is_not_there(store, model, engine, tmp_path):
    keys = [add_key(tmp_path / "keys", name) for name in ("alice", "bob")]
    with running_api(store, model, keys=ApiKeys(tmp_path / "keys")) as api:
        alice, bob = (openai.OpenAI(base_url=f"{api.url}/v1", api_key=key, max_retries=0) for key in keys)
        with alice, bob:
            made = finished(alice, engine)
            for call in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel, bob.responses.input_items.list):
                with pytest.raises(openai.NotFoundError):
                    call(made.id)
            with pytest.raises(openai.NotFoundError):
                bob.responses.retrieve(made.id, stream=True)
            with pytest.raises(openai.BadRequestError, match="no stored response"):
                background(bob, previous_response_id=made.id)
            assert alice.responses.retrieve(made.id) == made


# --- refusals ------------------------------------------------------------------------------------------------------------

BAD = [
    ({}, "input", 400),
    ({"input": []}, "input", 400),
    ({"input": 1}, "input", 400),
    ({"input": "a", "model": "gpt-9"}, "model", 404),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type", 400),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "o"}]}, "input[0].call_id", 400),
    ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name", 400),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content", 400),
    ({"input": [{"type": "computer_call"}]}, "input[0].type", 400),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", 400),
    ({"input": "a", "background": True, "store": False}, "background", 400),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type", 400),
    ({"input": "a", "tools": [{"type": "function", "name": "f"}, {"type": "function", "name": "f"}]}, "tools", 400),
    ({"input": "a", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", 400),
    ({"input": "a", "tool_choice": "required"}, "tool_choice", 400),
    ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", 400),
    ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format.schema", 400),
    ({"input": "a", "response_format": {"type": "json_object"}}, "response_format", 400),
    ({"input": "a", "text": {"verbosity": "low"}}, "text.verbosity", 400),
    ({"input": "a", "truncation": "auto"}, "truncation", 400),
    ({"input": "a", "include": ["everything"]}, "include[0]", 400),
    ({"input": "a", "reasoning": {"effort": "high"}}, "reasoning.effort", 400),
    ({"input": "a", "service_tier": "flex"}, "service_tier", 400),
    ({"input": "a", "conversation": "conv_1"}, "conversation", 400),
    ({"input": "a", "prompt": {"id": "p"}}, "prompt", 400),
    ({"input": "a", "max_tokens": 3}, "max_tokens", 400),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", 400),
    ({"input": "a", "logprobs": 1}, "logprobs", 400),
    ({"input": "a", "n": 2}, "n", 400),
    ({"input": "a", "top_logprobs": 21}, "top_logprobs", 400),
    ({"input": "a", "stream_options": {"include_obfuscation": False}}, "stream_options", 400),
    ({"input": "a", "metadata": {"a": 1}}, "metadata.a", 400),
]


@pytest.mark.parametrize(("body", "param", "status"), BAD, ids=lambda value: str(value)[:60])
def test_what_is_not_supported_is_refused_by_name(refusing_api, body, param, status):
    answer = refusing_api.client.post("/v1/responses", content=json.dumps(body))
    assert answer.status_code == status
    error = answer.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("streaming=true", "streaming"),
        ("stream=1", "stream"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
        ("starting_after=3", "starting_after"),
        ("include[]=everything", "include[]"),
    ],
)
def test_queries_are_refused_by_name(refusing_api, query, param):
    answer = refusing_api.client.get(f"/v1/responses/resp_1?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("query", "param"), [("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=x", "after"), ("x=1", "x")]
)
def test_queries_of_items_are_refused_by_name(query, param, model):
    store = new_memory_store()
    with running_api(store, model) as api:
        made = api.client.post("/v1/responses", json={"input": "a", "background": True}).json()
        answer = api.client.get(f"/v1/responses/{made['id']}/input_items?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_nulls_are_as_good_as_nothing(memory_api):
    names = (
        "instructions",
        "metadata",
        "tools",
        "text",
        "reasoning",
        "include",
        "store",
        "stream",
        "temperature",
        "previous_response_id",
    )
    answer = memory_api.client.post("/v1/responses", json={"input": "a", "background": True, **dict.fromkeys(names)})
    assert answer.status_code == 200
    assert (answer.json()["store"], answer.json()["tools"], answer.json()["metadata"]) == (True, [], {})


def test_ten_responses_at_once(sdk, engine):
    waits = [in_thread(lambda: sdk.responses.create(model=MODEL, input="a")) for _ in range(10)]
    until(lambda: engine.claim() is None or len(engine.held) == 10)
    engine.write(*engine.held, tokens=5)
    engine.write(*engine.held, end="stop")
    assert {wait().output_text for wait in waits} == {"t0 t1 t2 t3 t4 t5 "}


def test_the_async_client(store, model):
    import asyncio

    engine = ScriptedEngine(store)
    stop = threading.Event()

    def run():
        while not stop.wait(0.01):
            for job_id in engine.claim():
                engine.write(job_id, tokens=3, end="stop")

    async def ask(url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.responses.create(model=MODEL, input="a")
            async with client.responses.stream(model=MODEL, input="a") as stream:
                streamed = await stream.get_final_response()
            again = [event.type async for event in await client.responses.retrieve(streamed.id, stream=True)]
            return whole.output_text, streamed.output_text, again[-1]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    with running_api(store, model) as api:
        assert asyncio.run(ask(api.url)) == ("t0 t1 t2 ", "t0 t1 t2 ", "response.completed")
    stop.set()
    thread.join(10)
