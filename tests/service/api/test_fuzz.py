"""Whatever bytes arrive, the api answers in the form it promises: a cursor never repeats a token, a body costs
bounded time and memory."""

import http.client
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.api.openai.batch_requests import BatchLine, BatchRequest
from service.api.openai.chat_requests import ChatMessage, ChatRequest
from service.api.openai.response_requests import ResponseRequest
from service.api.problems import InvalidRequest
from service.api.schemas import CompletionRequest, JobRequest, parse_json, validate
from tests.service.api.conftest import new_memory_store
from tests.service.api.rig import DIRECT, ScriptedEngine, parse_events, running_api

LENGTH = 7  #: tokens of the job whose stream is asked for
MIB = 1 << 20


@pytest.fixture(scope="module")
def api(model):
    with running_api(new_memory_store(), model) as running:
        engine = ScriptedEngine(running.source.store)
        running.finished_job = running.submit(max_tokens=LENGTH)
        engine.claim_one(running.finished_job)
        engine.write(running.finished_job, tokens=LENGTH - 1)
        engine.write(running.finished_job, end="length")
        yield running


# --- cursors -------------------------------------------------------------------------------------------------------------

NUMBERS = st.integers(-2, LENGTH + 3) | st.integers()
NEAR_NUMBERS = st.builds(
    "{}{}{}".format, st.sampled_from(["", "+", "-", "0", "0x", " "]), NUMBERS, st.sampled_from(["", ".0", "e1", "_0", "١"])
)
CURSORS = NUMBERS.map(str) | NEAR_NUMBERS | st.text()


def exactly_the_rest(status, text, cursor):
    """Nothing is answered but the tokens after the cursor, in order, or that the cursor is none."""
    if status == 400:
        return
    assert cursor.isascii()
    assert cursor.isdigit()
    if status == 204:
        assert int(cursor) == LENGTH + 1
        return
    assert status == 200
    ids = [int(event.id) for event in parse_events(text.splitlines()) if event.name == "token"]
    assert ids == list(range(int(cursor) + 1, LENGTH + 1))


@given(cursor=CURSORS)
def test_any_cursor_in_the_url(api, cursor):
    answer = api.client.get(f"/v1/jobs/{api.finished_job}/events", params={"after": cursor})
    exactly_the_rest(answer.status_code, answer.text, cursor)
    assert answer.status_code != 400 or answer.json()["code"] in ("invalid_cursor", "cursor_ahead")


@given(cursor=CURSORS.map(str.encode) | st.binary(max_size=40))
@example(b"\x00")
@example(b"1\r\nLast-Event-ID: 2")
def test_any_cursor_in_the_header(api, cursor):
    """Bytes as they come: no client of ours would send most of these."""
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        request = f"GET /v1/jobs/{api.finished_job}/events HTTP/1.1\r\nHost: x\r\nConnection: close\r\nLast-Event-ID: "
        connection.sendall(request.encode() + cursor + b"\r\n\r\n")
        response = http.client.HTTPResponse(connection)
        response.begin()
        text = response.read().decode()
    exactly_the_rest(response.status, text, cursor.decode("latin-1").split("\r\n")[0].strip(" \t"))


# --- bodies --------------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(), max_size=8), inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.lists(st.dictionaries(st.sampled_from([*ChatMessage.model_fields]), JSON | st.just("tool"), max_size=4), max_size=2)
REQUESTS = [JobRequest, CompletionRequest, ChatRequest, ResponseRequest, BatchRequest, BatchLine]
NAMES = st.sampled_from([name for model in REQUESTS for name in model.model_fields])
BODIES = st.dictionaries(NAMES, JSON, max_size=5) | st.fixed_dictionaries({"model": st.just("tiny"), "messages": MESSAGES})


@pytest.mark.parametrize("model", REQUESTS)
@given(body=st.binary(max_size=200) | BODIES.map(lambda body: json.dumps(body).encode()))
def test_any_body_is_a_request_or_refused_by_name(model, body):
    try:
        asked = validate(model, parse_json(body))
    except InvalidRequest as error:
        str(error).encode()
        json.dumps([error.param, error.extra]).encode()
        return
    assert asked.model_dump_json()


@pytest.mark.parametrize("depth", [10, *range(900, 1010), 100_000])
def test_depth_is_refused_at_every_depth(depth):
    """Reading and writing JSON end their recursion at depths of their own."""
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        with pytest.raises(InvalidRequest):
            validate(JobRequest, parse_json(b'{"metadata":' + opening.encode() * depth + b"0" + closing.encode() * depth + b"}"))


def names(count, twice=False):
    return "{" + ",".join([f'"{i}":0' for i in range(count)] + ['"0":0'] * twice) + "}"


HUGE = {
    "a million stop strings": '{"prompt":"a","stop":[' + ",".join(['"x"'] * 1_000_000) + "]}",
    "a million unknown fields": names(700_000),
    "a name twice among a million": names(700_000, twice=True),
    "a name twice at the end of each of many objects": "[" + ",".join([names(1023, twice=True)] * 900) + "]",
    "a million names in metadata": '{"prompt":"a","metadata":' + names(700_000) + "}",
    "a million names in logit_bias": '{"prompt":"a","logit_bias":' + names(700_000) + "}",
    "a million messages": '{"messages":[' + ",".join(["{}"] * 1_000_000) + "]}",
    "many messages of many unknown fields": '{"messages":[' + ",".join([names(100)] * 4000) + "]}",
    "a million parts": '{"messages":[{"role":"user","content":[' + ",".join(["{}"] * 1_000_000) + "]}]}",
    "a million token ids": '{"prompt":[' + ",".join(["1"] * 1_000_000) + "]}",
    "a million empty lists": '{"prompt":[' + ",".join(["[]"] * 1_000_000) + "]}",
    "a name of megabytes": '{"' + "x" * (7 * MIB) + '":0}',
    "a number of megabytes": '{"seed":' + "9" * (7 * MIB) + "}",
}


HUGE_INPUTS = {
    "a million items": '{"input":[' + ",".join(["{}"] * 1_000_000) + "]}",
    "a million parts": '{"input":[{"role":"user","content":[' + ",".join(["{}"] * 1_000_000) + "]}]}",
    "a million annotations of something unknown": '{"input":[{"role":"x","content":[{"annotations":['
    + ",".join(["{}"] * 1_000_000)
    + "]}]}]}",
    "many items of many unknown fields": '{"input":[' + ",".join([names(100)] * 4000) + "]}",
    "a million tools": '{"input":"a","tools":[' + ",".join(["{}"] * 1_000_000) + "]}",
    "a million includes": '{"input":"a","include":[' + ",".join(["{}"] * 1_000_000) + "]}",
    "a million names in text": '{"input":"a","text":' + names(700_000) + "}",
}


@pytest.mark.parametrize("name", HUGE_INPUTS)
def test_a_huge_response_is_refused_in_bounded_time_and_memory(api, name):
    refused_cheaply(api, "/v1/responses", HUGE_INPUTS[name])


@pytest.mark.parametrize("name", HUGE)
def test_a_huge_body_is_refused_in_bounded_time_and_memory(api, name):
    refused_cheaply(api, "/v1/jobs", HUGE[name])


def refused_cheaply(api, path, text):
    """While one request is parsed, no stream of any client moves."""
    body = text.encode()
    assert len(body) < api.context.options.max_body_bytes, "this would be refused unread"
    before, began = peak_memory(), time.process_time()
    answer = api.client.post(path, content=body)
    seconds, grown = time.process_time() - began, peak_memory() - before
    assert answer.status_code == 400
    assert len(answer.content) < 10_000
    assert seconds < 5
    assert grown < 400 * MIB


def test_a_long_text_holds_up_nobody_else(api):
    """It is tokenised in a thread, outside the interpreter's lock."""
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=api.url, **DIRECT) as other:
        answer = pool.submit(api.client.post, "/v1/jobs", json={"prompt": "word " * (MIB // 5)})
        waits = []
        while not answer.done():
            began = time.monotonic()
            assert other.get("/livez").status_code == 200
            waits.append(time.monotonic() - began)
    assert answer.result().json()["code"] == "context_length_exceeded"
    assert max(waits) < sum(waits) / 2


def peak_memory():
    """Of this process since the last call, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    Path("/proc/self/clear_refs").write_text("5")
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


def test_fifty_megabytes_are_not_read(api):
    body = b'{"prompt":"' + b"x" * (50 * MIB) + b'"}'
    answer = api.client.post("/v1/jobs", content=body)
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
