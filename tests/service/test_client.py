"""The client against a server that answers badly: exactly once all the same. The server is a transport, no socket is opened."""

import json

import httpx
import pytest

from service.client import ClientError, JobClient, StreamBroken


class Script(httpx.BaseTransport):
    """Answers each request with the next of ``answers``: a Response, an exception, or a list of SSE chunks and exceptions."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []

    def handle_request(self, request):
        request.read()
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return answer
        return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, stream=Chunks(answer))


class Chunks(httpx.SyncByteStream):
    def __init__(self, parts):
        self._parts = parts

    def __iter__(self):
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            yield part.encode()


def token(index, text="x"):
    data = json.dumps({"index": index, "token_ids": [100 + index], "text": text})
    return f"id: {index + 1}\nevent: token\ndata: {data}\n\n"


DONE = 'id: 4\nevent: done\ndata: {"status": "completed"}\n\n'
LOST = httpx.ReadError("peer vanished")
AWAY = httpx.ConnectError("refused")


def follow(*answers, after=0, patience=5.0):
    script = Script(*answers)
    with JobClient("http://localhost:1", transport=script, patience=patience) as client:
        return list(client.follow("job_1", after=after)), script


def tokens(events):
    return [token for event in events if event.kind == "token" for token in event.data["token_ids"]]


def test_a_stream_is_followed_to_its_end():
    events, script = follow([token(0), token(1), ": ping\n\n", token(2), DONE])
    assert tokens(events) == [100, 101, 102]
    assert [event.kind for event in events][-1] == "done"
    assert "Last-Event-ID" not in script.requests[0].headers


@pytest.mark.parametrize("cut", [LOST, httpx.RemoteProtocolError("incomplete chunked read"), httpx.ReadTimeout("silence")])
def test_a_broken_stream_goes_on_after_the_last_token_seen(cut):
    events, script = follow([token(0), token(1), cut], AWAY, httpx.Response(503), [token(2), DONE])
    assert tokens(events) == [100, 101, 102]
    assert [event.kind for event in events] == ["token", "token", "lost", "resumed", "token", "done"]
    assert [request.headers.get("Last-Event-ID") for request in script.requests] == [None, "2", "2", "2"]


def test_a_cut_in_the_middle_of_an_event_loses_nothing():
    events, _ = follow([token(0), token(1)[:25]], [token(1), token(2), DONE])
    assert tokens(events) == [100, 101, 102]


def test_a_clean_close_without_an_ending_is_resumed():
    events, _ = follow([token(0)], [token(1), token(2), DONE])
    assert tokens(events) == [100, 101, 102]


@pytest.mark.parametrize("wrong", [[token(0), token(0)], [token(0), token(2)], [token(1)]])
def test_a_lost_or_repeated_token_is_an_error_never_silence(wrong):
    with pytest.raises(StreamBroken, match="expected token"):
        follow([*wrong, DONE])


def test_nothing_more_to_say_ends_quietly():
    events, _ = follow(httpx.Response(204), after=4)
    assert events == []


def test_a_refusal_is_not_retried():
    problem = {"title": "Not found", "detail": "there is no job job_1", "status": 404}
    with pytest.raises(ClientError, match="there is no job job_1"):
        follow(httpx.Response(404, json=problem))


def test_patience_ends():
    with pytest.raises(ClientError, match="the job goes on"):
        follow(*[AWAY] * 50, patience=0.3)


def test_a_submission_is_sent_again_with_the_same_key():
    script = Script(LOST, httpx.Response(503, headers={"Retry-After": "0"}), httpx.Response(202, json={"id": "job_7"}))
    with JobClient("http://localhost:1", transport=script) as client:
        assert client.submit({"prompt": "hi"}) == "job_7"
    keys = {request.headers["Idempotency-Key"] for request in script.requests}
    assert len(script.requests) == 3
    assert len(keys) == 1
    assert {request.read() for request in script.requests} == {b'{"prompt":"hi"}'}


def test_a_full_queue_is_said_in_the_servers_words():
    script = Script(*[httpx.Response(429, json={"detail": "the queue is full"})] * 3)
    with (
        JobClient("http://localhost:1", transport=script, patience=0.0) as client,
        pytest.raises(ClientError, match="the queue is full"),
    ):
        client.submit({"prompt": "hi"})


def test_ids_cannot_reach_other_paths():
    script = Script(httpx.Response(404, json={"detail": "no"}))
    with JobClient("http://localhost:1", transport=script) as client, pytest.raises(ClientError):
        client.job("../../metrics?x")
    assert script.requests[0].url.raw_path == b"/v1/jobs/..%2F..%2Fmetrics%3Fx"
