"""What is refused before any work is done for it: heads without end, prompts that are too long, lists without measure."""

import contextlib
import socket
import time

import pytest

from service import listening
from service.api import protocol
from tests.service.api.conftest import new_memory_store
from tests.service.api.rig import PROMPT, ScriptedEngine, running_api, until


def exchange(api, *pieces):
    """All that comes back for these bytes, sent one after the other until the server has enough."""
    with connected(api) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
        except ConnectionError:  # closed while we still sent
            return b""
        return answer


def connected(api):
    host, port = api.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def events_of(job_id):
    return f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: x\r\n\r\n".encode()


REQUEST = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


def test_headers_of_common_size_are_taken(refusing_api):
    answer = exchange(refusing_api, REQUEST, b"X-Long: " + b"x" * 20_000 + b"\r\n", b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("piece", [b"x", b"X-Many: x\r\n", b"\t \t"], ids=["one without end", "many", "folded"])
def test_a_head_without_end_is_cut_off(refusing_api, piece):
    """httptools buffers headers without limit: one connection could fill the memory. 2 MiB are sent."""
    pieces = [REQUEST, b"X-Long: ", *[piece * (4096 // len(piece))] * 512]
    answer = exchange(refusing_api, *pieces)
    assert answer == b"" or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
    assert refusing_api.client.get("/livez").status_code == 200


def test_a_body_may_be_longer_than_a_head(refusing_api):
    body = b'{"prompt": "' + b"x" * (3 * protocol.MAX_HEAD) + b'", "max_tokens": 0}'
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    pieces = [body[i : i + 1000] for i in range(0, len(body), 1000)]
    answer = exchange(refusing_api, head, *pieces)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"max_tokens" in answer


@pytest.mark.parametrize("sent", [b"", b"GET /livez HT", b"GET /livez HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_that_does_not_come_is_not_waited_for(memory_api, monkeypatch, sent):
    """Slowloris: connections that say a byte now and then would hold every descriptor."""
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    assert exchange(memory_api, sent) == b""  # closed by the server, well within the time-out of the client


@pytest.mark.parametrize("line", [b"POST /v1/jobs", b"GET /livez", b"POST /nowhere"], ids=lambda line: line.decode())
def test_a_body_that_does_not_come_is_not_waited_for(memory_api, monkeypatch, line):
    """Whether somebody reads it or not: where the answer did not wait for the body, each byte of it once kept the connection."""
    monkeypatch.setattr(protocol, "BODY_SECONDS", 0.4)
    began = time.monotonic()
    with connected(memory_api) as connection:
        connection.sendall(line + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 5.0:
                connection.sendall(b"x")
                time.sleep(0.05)
    assert time.monotonic() - began < 5.0


def test_a_body_that_comes_slowly_but_steadily_is_waited_for(refusing_api, monkeypatch):
    monkeypatch.setattr(protocol, "BODY_SECONDS", 1.5)
    body = b'{"prompt": "' + b"x" * (6 * protocol.BODY_PIECE) + b'", "max_tokens": 0}'
    with connected(refusing_api) as connection:
        connection.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
        began = time.monotonic()
        for at in range(0, len(body), protocol.BODY_PIECE):
            connection.sendall(body[at : at + protocol.BODY_PIECE])
            time.sleep(0.5)
        assert time.monotonic() - began > 2 * protocol.BODY_SECONDS
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")


def test_a_request_that_waits_its_turn_behind_a_stream_is_not_called_slow(memory_api, monkeypatch):
    """We read no further while it waits, so its body cannot come."""
    monkeypatch.setattr(protocol, "BODY_SECONDS", 0.2)
    job_id = memory_api.submit()
    with connected(memory_api) as connection:
        connection.sendall(events_of(job_id))
        connection.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 200_000)
        time.sleep(1.0)
        memory_api.client.post(f"/v1/jobs/{job_id}/cancel")
        received = b""
        while b"event: cancelled" not in received:
            received += connection.recv(65536)


def test_a_stream_ends_with_its_connection_though_a_request_waits_behind_it(memory_api):
    """uvicorn told the waiting request alone: the stream went on until its next write, which then failed as a bug of ours."""
    job_id = memory_api.submit()
    with connected(memory_api) as connection:
        connection.sendall(events_of(job_id) + REQUEST + b"\r\n")
        until(lambda: memory_api.metric("open_streams") == 1)
    until(lambda: memory_api.metric("open_streams") == 0, seconds=5.0)


def test_a_stream_that_nobody_reads_is_given_up(model, monkeypatch):
    """It once kept its place and its descriptor for as long as the client's kernel answered. Text fills both kernels' buffers."""
    monkeypatch.setattr(listening, "UNREAD_SECONDS", 1.0)
    store = new_memory_store()
    engine = ScriptedEngine(store)
    with running_api(store, model) as api:
        job_id = api.submit(max_tokens=64)
        engine.claim_one(job_id)
        engine.write(job_id, tokens=64, texts=["x" * 65536] * 64)
        host, port = api.url.removeprefix("http://").split(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
            connection.connect((host, int(port)))
            connection.sendall(events_of(job_id))
            until(lambda: api.metric("open_streams") == 1)
            until(lambda: api.metric("open_streams") == 0)


def test_a_connection_may_rest_between_requests(memory_api, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 1.0)
    host, port = memory_api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=2) as connection:
        for _ in range(2):
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            connection.settimeout(1.5)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            connection.settimeout(2)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x" * 1001}, "prompt"),
        ({"messages": [{"role": "user", "content": "x" * 600}, {"role": "user", "content": "x" * 600}]}, "messages"),
        ({"messages": [{"role": "user", "name": "x" * 1001, "content": "x"}]}, "messages"),
    ],
)
def test_a_prompt_that_is_too_long_is_not_tokenised(model, store, monkeypatch, body, param):
    with running_api(store, model, max_prompt_chars=1000) as api:

        def never(*_):
            raise AssertionError("tokenised")

        monkeypatch.setattr(model.tokenization, "encode", never)
        monkeypatch.setattr(model.tokenization, "encode_chat", never)
        answer = api.client.post("/v1/jobs", json=body)
        assert (answer.status_code, answer.json()["code"], answer.json()["param"]) == (400, "prompt_too_long", param)
        assert "--max-prompt-chars" in answer.json()["detail"]


@pytest.mark.parametrize(
    "asked",
    [
        {"stop": ["x"] * 17},
        {"stop": ["x" * 1025]},
        {"stop": ["x"] * 1_000_000},
        {"max_tokens": 10**9},
        {"max_tokens": 10**30},
        {"metadata": {str(i): "x" for i in range(17)}},
        {"priority": 10**6},
        {"temperature": 1e308},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_lists_and_numbers_without_measure_are_refused_by_name(refusing_api, asked):
    answer = refusing_api.client.post("/v1/jobs", json={"prompt": PROMPT, **asked})
    assert answer.status_code == 400
    assert answer.json()["param"].startswith(next(iter(asked)))


@pytest.mark.parametrize(
    "job_id",
    ["..", "a*", "a%3fb", "[a-z]", "a:b", "a{store}", "a%20b", "a%00b", "a%0d%0ab", "é", "x" * 81, "job_١"],
)
def test_what_cannot_be_an_id_never_reaches_a_key(memory_api, job_id):
    store, asked = memory_api.source.store, []

    class Watched:
        def __getattr__(self, name):
            asked.append(name)
            return getattr(store, name)

    memory_api.source.store = Watched()
    for method, path in (("GET", ""), ("POST", "/cancel"), ("GET", "/events")):
        answer = memory_api.client.request(method, f"/v1/jobs/{job_id}{path}")
        assert answer.status_code in (404, 405), (job_id, path, answer.status_code)
    assert not {"read", "get", "cancel", "fail"} & set(asked)
    assert memory_api.client.get("/v1/jobs/job_1").status_code == 404
    assert "read" in asked
