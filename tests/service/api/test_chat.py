"""``/v1/chat/completions`` as OpenAI's own SDK and a plain client see it."""

import asyncio
import json

import httpx
import openai
import pytest

from storage.job_spec import JobSpec
from tests.service.api.calls import claimed, in_thread
from tests.service.api.rig import DIRECT, MODEL, until

CHAT = [{"role": "user", "content": "Hi"}]
EXTRA = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "priority": 7, "deadline_seconds": 60}


def test_a_whole_answer(sdk, engine, store, model):
    wait = in_thread(lambda: sdk.chat.completions.create(model=MODEL, messages=CHAT, seed=3, max_completion_tokens=3))
    job_id = claimed(engine)
    engine.write(job_id, tokens=2, cached_tokens=1)
    engine.write(job_id, end="length")
    answer = wait()
    assert answer.id == job_id
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model, answer.service_tier) == ("chat.completion", MODEL, "default")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "t0 t1 t2 ", "length")
    record = store.get(job_id)
    assert record.prompt_token_ids == tuple(model.tokenization.encode_chat(CHAT))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(record.prompt_token_ids), 3)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    assert JobSpec.from_json(record.spec).kind == "chat"


def test_a_streamed_answer(sdk, engine):
    options = {"include_usage": True, "include_obfuscation": False}
    stream = sdk.chat.completions.create(model=MODEL, messages=CHAT, stream=True, stream_options=options)
    job_id = claimed(engine)
    engine.write(job_id, tokens=3, texts=["a", "", "b"])
    engine.write(job_id, end="stop")
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks[:-1]] == ["", "a", "b", "t3 ", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 4 + ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 4)
    assert {(chunk.id, chunk.object) for chunk in chunks} == {(job_id, "chat.completion.chunk")}


def test_the_bytes_of_a_stream(api, engine):
    wait = in_thread(lambda: api.client.post("/v1/chat/completions", json={"model": MODEL, "messages": CHAT, "stream": True}))
    engine.write(claimed(engine), tokens=2, end="stop")
    lines = [line for line in wait().text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    first = json.loads(lines[0].removeprefix("data: "))
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None, "finish_reason": None}
    ]
    assert "usage" not in first


def test_choices_of_one_chat(sdk, engine):
    stream = sdk.chat.completions.create(model=MODEL, messages=CHAT, n=2, seed=1, stream=True)
    first = claimed(engine)
    until(lambda: engine.claim() or len(engine.held) == 2)
    engine.write(f"{first}-1", tokens=2, end="stop")
    engine.write(first, tokens=1, end="length")
    texts, reasons = ["", ""], {}
    for (choice,) in (chunk.choices for chunk in stream):
        texts[choice.index] += choice.delta.content or ""
        reasons |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert texts == ["t0 ", "t0 t1 "]
    assert reasons == {0: "length", 1: "stop"}


def test_the_sdks_stream_helper(sdk, engine):
    def follow():
        with sdk.chat.completions.stream(model=MODEL, messages=CHAT, logprobs=True) as stream:
            kinds = [event.type for event in stream]
            return kinds, stream.get_final_completion()

    wait = in_thread(follow)
    engine.write(claimed(engine), tokens=2, end="stop")
    kinds, final = wait()
    assert final.choices[0].message.content == "t0 t1 "
    assert kinds.count("content.delta") == 3, "the empty one of the beginning, as of OpenAI"
    assert kinds[-2:] == ["content.done", "logprobs.content.done"]


def test_the_sdks_parse_and_async_client(api, sdk, engine):
    wait = in_thread(lambda: sdk.chat.completions.parse(model=MODEL, messages=CHAT))
    engine.write(claimed(engine), end="stop")
    assert wait().choices[0].message.content == "t0 "

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(model=MODEL, messages=CHAT, stream=True)
            return [chunk.choices[0].delta.content async for chunk in stream]

    wait = in_thread(lambda: asyncio.run(ask()))
    engine.write(claimed(engine), tokens=2, end="stop")
    assert wait() == ["", "t0 ", "t1 ", None]


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs_tell_the_bytes_of_each_token(sdk, engine, model, streamed):
    """Of an emoji's bytes each token holds some: together they are the emoji, alone none is text."""
    tokens = model.tokenization.encode("🎈")
    assert len(tokens) > 1
    asked = {"model": MODEL, "messages": CHAT, "logprobs": True, "top_logprobs": 2, "stream": streamed}
    wait = in_thread(lambda: sdk.chat.completions.create(**asked))
    job_id = claimed(engine)
    engine.say(job_id, [(token, "🎈" if i == len(tokens) - 1 else "") for i, token in enumerate(tokens)])
    answer = wait()
    choices = [chunk.choices[0] for chunk in answer] if streamed else answer.choices
    found = [shown for choice in choices if choice.logprobs for shown in choice.logprobs.content]
    assert b"".join(bytes(shown.bytes) for shown in found) == "🎈".encode()
    assert "�" in found[0].token
    assert (found[0].logprob, [top.logprob for top in found[0].top_logprobs]) == (-0.5, [-0.5, -1.5])


def test_everything_that_may_be_asked(sdk, store, engine):
    asked = {
        "temperature": 0.5, "top_p": 0.9, "presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"7": 2}, "stop": ["x"],
        "max_tokens": 5, "max_completion_tokens": 5, "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s",
        "service_tier": "auto", "prompt_cache_key": "k", "modalities": ["text"], "response_format": {"type": "text"},
        "parallel_tool_calls": True, "store": False,
    }  # fmt: skip
    wait = in_thread(lambda: sdk.chat.completions.create(model=MODEL, messages=CHAT, extra_body=EXTRA, **asked))
    job_id = claimed(engine)
    record = store.get(job_id)
    spec = JobSpec.from_json(record.spec)
    assert (spec.temperature, spec.top_p, spec.presence_penalty, spec.frequency_penalty) == (0.5, 0.9, 1.0, -1.0)
    assert (spec.top_k, spec.min_p, spec.repetition_penalty, spec.min_tokens) == (5, 0.1, 1.1, 1)
    assert (spec.logit_bias, spec.stop, spec.max_tokens, spec.metadata, spec.logprobs) == ({7: 2.0}, ("x",), 5, {"a": "b"}, None)
    assert record.priority == 7
    assert record.deadline_at == pytest.approx(record.created_at + 60, abs=1)
    engine.write(job_id, end="stop")
    wait()


def test_roles_and_parts_reach_the_template(api, store, engine, model):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Hi", "name": "bob"},
    ]
    wait = in_thread(lambda: api.client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages}))
    job_id = claimed(engine)
    as_rendered = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi", "name": "bob"}]
    assert store.get(job_id).prompt_token_ids == tuple(model.tokenization.encode_chat(as_rendered))
    engine.write(job_id, end="stop")
    assert wait().status_code == 200


TOOL = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
REFUSED = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "function", "content": "a", "name": "f"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "a", "reasoning_content": "b"}]}, "messages[0].reasoning_content"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"n": 17}, "n"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"functions": []}, "functions"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"tools": [TOOL]}, "tools"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"seed": 1.5}, "seed"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=str)
def test_refusals_name_the_field(refusing_api, body, param):
    answer = refusing_api.client.post("/v1/chat/completions", json={"model": MODEL, "messages": CHAT, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


def test_a_long_chat_is_refused_before_it_is_tokenised(refusing_api):
    limit = refusing_api.context.options.max_prompt_chars
    messages = [{"role": "user", "content": "x" * (limit // 2 + 1)}] * 2
    answer = refusing_api.client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "prompt_too_long")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_failed_job_is_an_error(sdk, engine, streamed):
    wait = in_thread(lambda: list(sdk.chat.completions.create(model=MODEL, messages=CHAT, stream=streamed)))
    engine.fail(claimed(engine), "poison", "three crashes")
    with pytest.raises(openai.APIError, match="three crashes"):
        wait()


def test_a_deadline_that_passes_is_not_asked_for_again(api):
    """The SDK sends again what ended in a 500: work that came too late would be done three times."""
    with (
        openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=2) as sdk,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        sdk.chat.completions.create(model=MODEL, messages=CHAT, extra_body={"deadline_seconds": 0.1})
    assert (caught.value.code, caught.value.param) == ("deadline_exceeded", "deadline_seconds")
    assert len(api.client.get("/v1/jobs").json()["data"]) == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_when_its_client_goes_away_a_plain_chat_is_cancelled(api, store, engine, streamed):
    def leave():
        with httpx.Client(**DIRECT, timeout=0.5) as client:
            client.post(f"{api.url}/v1/chat/completions", json={"model": MODEL, "messages": CHAT, "stream": streamed})

    wait = in_thread(leave)
    job_id = claimed(engine)
    with pytest.raises(httpx.TimeoutException):
        wait()
    until(lambda: store.get(job_id).status == "cancelled")
