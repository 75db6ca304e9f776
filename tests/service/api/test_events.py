"""The native event stream: exactly once, from any position, through crashes of everything else."""

import random
import threading

import httpx
import pytest

from storage.records import JobStatus
from tests.service.api.rig import DIRECT, Stream, collect, parse_events, text_of, until

TOKENS = list(range(100, 164))


def finished(api, engine, tokens=64, end="length"):
    job_id = api.submit()
    engine.claim_one(job_id)
    if tokens > 1:
        engine.write(job_id, tokens=tokens - 1)
    engine.write(job_id, end=end)
    return job_id


def test_a_stream_shows_the_life_of_a_job(api, engine):
    job_id = api.submit()
    stream = Stream(api, job_id)
    until(lambda: stream.events)
    engine.claim_one(job_id)
    until(lambda: len(stream.events) == 2)
    for _ in range(3):
        engine.write(job_id)
    engine.write(job_id, end="stop")
    stream.wait()
    assert [event.name for event in stream.events] == ["queued", "in_progress", "token", "token", "token", "token", "done"]
    assert [event.id for event in stream.events] == ["", "", "1", "2", "3", "4", "5"]
    assert [event.data for event in stream.events[2:6]] == [
        {"index": i, "token_ids": [100 + i], "text": text_of(i)} for i in range(4)
    ]
    assert stream.events[-1].data == {
        "status": "completed",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8, "cached_tokens": 0},
        "error": None,
    }


def test_resume_at_every_position_gives_exactly_the_rest(api, engine):
    job_id = finished(api, engine)
    for seen in range(65):
        events = collect(api, job_id, str(seen))
        assert [event.data["token_ids"][0] for event in events if event.name == "token"] == TOKENS[seen:]
        assert [int(event.id) for event in events if event.id] == list(range(seen + 1, 66))
        assert events[-1].name == "done"
    assert api.metric("stream_resumes_total") == 64


def test_resume_at_every_position_of_a_running_job(api, engine):
    job_id = api.submit()
    engine.claim_one(job_id)
    engine.write(job_id, tokens=40)
    streams = [Stream(api, job_id, str(seen)) for seen in range(41)]
    until(lambda: all(stream.events for stream in streams))
    engine.write(job_id, tokens=23)
    engine.write(job_id, end="length")
    for seen, stream in enumerate(streams):
        assert stream.wait().tokens == TOKENS[seen:]


def test_after_the_end_there_is_nothing(api, engine):
    job_id = finished(api, engine, tokens=5)
    answer = api.client.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": "6"})
    assert answer.status_code == 204
    assert answer.content == b""


@pytest.mark.parametrize("ended", [False, True])
def test_a_position_ahead_of_the_log_is_refused_in_words(api, engine, ended):
    job_id = api.submit()
    engine.claim_one(job_id)
    engine.write(job_id, tokens=5, end="length" if ended else "")
    answer = api.client.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": "7"})
    assert answer.status_code == 400
    assert answer.headers["Content-Type"] == "application/problem+json"
    problem = answer.json()
    assert (problem["code"], problem["param"]) == ("cursor_ahead", "Last-Event-ID")
    assert "7" in problem["detail"]
    assert "5 tokens" in problem["detail"]


@pytest.mark.parametrize("cursor", ["", "x", "-1", "1.0", " 1", "1e3", "9" * 16, "0x1", "١"])
def test_garbage_is_no_position(api, engine, cursor):
    job_id = finished(api, engine, tokens=1)
    answer = api.client.get(f"/v1/jobs/{job_id}/events", params={"after": cursor})
    assert answer.status_code == 400
    assert answer.json()["param"] == "after"
    if cursor.isascii() and cursor == cursor.strip():
        header = api.client.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": cursor})
        assert header.status_code == 400


def test_the_header_wins_over_the_url(api, engine):
    """EventSource reconnects to the URL it was given, with the header."""
    job_id = finished(api, engine, tokens=5)
    answer = api.client.get(f"/v1/jobs/{job_id}/events?after=1", headers={"Last-Event-ID": "4"})
    assert answer.text.count("event: token") == 1


def test_the_headers_that_proxies_need(api, engine):
    answer = api.client.get(f"/v1/jobs/{finished(api, engine, tokens=1)}/events")
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert answer.headers["Cache-Control"] == "no-cache"
    assert answer.headers["X-Accel-Buffering"] == "no"


def test_a_failed_and_a_cancelled_job(api, engine):
    failed, cancelled = api.submit(), api.submit()
    streams = [Stream(api, failed), Stream(api, cancelled)]
    until(lambda: all(stream.events for stream in streams))
    engine.claim_one(failed)
    engine.write(failed)
    engine.fail(failed, "poison", "three crashes")
    assert api.client.post(f"/v1/jobs/{cancelled}/cancel").json()["status"] == "cancelled"
    end = streams[0].wait().events[-1]
    assert (end.name, end.id, end.data["error"]) == ("failed", "2", {"code": "poison", "message": "three crashes"})
    end = streams[1].wait().events[-1]
    assert (end.name, end.id) == ("cancelled", "1")


def test_an_engine_crash_is_a_pause_and_is_told(api, engine):
    job_id = api.submit()
    stream = Stream(api, job_id)
    engine.claim_one(job_id)
    engine.write(job_id, tokens=3)
    until(lambda: len(stream.tokens) == 3)
    engine.register()
    engine.write(job_id, tokens_replayed=2, pages_restored=1)
    engine.write(job_id, end="stop")
    stream.wait()
    assert stream.tokens == TOKENS[:5]
    recovered = [event for event in stream.events if event.name == "recovered"]
    assert [(event.id, event.data) for event in recovered] == [("", {"count": 1, "tokens_replayed": 2, "pages_restored": 1})]
    assert stream.events.index(recovered[0]) < next(i for i, e in enumerate(stream.events) if e.id == "5")


def test_many_readers_of_one_job_each_get_all_of_it(api, engine):
    job_id = api.submit()
    streams = [Stream(api, job_id) for _ in range(8)]
    until(lambda: all(stream.events for stream in streams))
    engine.claim_one(job_id)
    for _ in range(63):
        engine.write(job_id)
    engine.write(job_id, end="length")
    for stream in streams:
        assert stream.wait().tokens == TOKENS


def test_a_slow_reader_reads_on_from_the_log(api, engine):
    """It holds nobody up, is not buffered for, and misses nothing."""
    job_id = api.submit(max_tokens=500)
    engine.claim_one(job_id)
    release = threading.Event()
    slow: list[bytes] = []

    def read_slowly():
        url = f"{api.url}/v1/jobs/{job_id}/events"
        with httpx.Client(timeout=30, **DIRECT) as client, client.stream("GET", url) as got:
            chunks = got.iter_raw(chunk_size=64)
            slow.append(next(chunks))
            release.wait(20)
            slow.extend(chunks)

    thread = threading.Thread(target=read_slowly)
    thread.start()
    until(lambda: slow)
    fast = Stream(api, job_id)
    padding = "x" * 20_000
    for _ in range(49):
        engine.write(job_id, tokens=10, texts=[padding] * 10)
    engine.write(job_id, end="stop", tokens=10, texts=[padding] * 10)
    assert fast.wait(20).tokens == list(range(100, 600))
    release.set()
    thread.join(20)
    text = b"".join(slow).decode()
    assert text.count("event: token") == 500
    assert text.count("event: done") == 1


def test_a_long_log_is_read_whole(api, engine):
    job_id = api.submit(max_tokens=500)
    engine.claim_one(job_id)
    engine.write(job_id, tokens=499)
    stream = Stream(api, job_id)
    until(lambda: len(stream.tokens) == 499)
    engine.write(job_id, end="length")
    assert stream.wait().tokens == list(range(100, 600))


def test_a_purged_job_ends_the_stream(store, model, engine):
    """Retention is hours; a reader that stays on a job that is deleted is told so."""
    from tests.service.api.rig import running_api

    class Forgetting:
        """The store, after a purge of everything."""

        def __init__(self, store):
            self._store = store
            self.purged = False

        def __getattr__(self, name):
            return getattr(self._store, name)

        def read(self, reads):
            return [None for _ in reads] if self.purged else self._store.read(reads)

    forgetting = Forgetting(store)
    with running_api(forgetting, model) as api:
        stream = Stream(api, api.submit())
        until(lambda: stream.events)
        forgetting.purged = True
        end = stream.wait().events[-1]
        assert (end.name, end.data["error"]["code"]) == ("failed", "gone")


def test_idle_streams_get_comments(store, model, engine):
    from tests.service.api.rig import running_api

    with running_api(store, model, keep_alive=0.05) as api:
        job_id = api.submit()
        with api.client.stream("GET", f"/v1/jobs/{job_id}/events") as response:
            lines = response.iter_lines()
            seen = [next(lines) for _ in range(12)]
        assert seen.count(": ping") >= 3


def test_news_that_do_not_show_do_not_silence_a_stream(store, model, engine):
    from tests.service.api.rig import running_api

    with running_api(store, model, keep_alive=0.3) as api:
        job_id = api.submit()
        engine.claim_one(job_id)
        ended = threading.Event()

        def die_again_and_again():
            while not ended.wait(0.05):
                engine.register()

        lives = threading.Thread(target=die_again_and_again)
        lives.start()
        try:
            with api.client.stream("GET", f"/v1/jobs/{job_id}/events", timeout=2) as response:
                lines = response.iter_lines()
                assert any(line == ": ping" for line in lines)
        finally:
            ended.set()
            lives.join()


def test_unknown_and_malformed_ids_are_not_found(api, engine):
    for job_id in ("job_" + "0" * 32, "nonsense", "a" * 200, "%2e%2e", "job_%00", "ü"):
        for answer in (
            api.client.get(f"/v1/jobs/{job_id}"),
            api.client.get(f"/v1/jobs/{job_id}/events"),
            api.client.post(f"/v1/jobs/{job_id}/cancel"),
        ):
            assert answer.status_code == 404, job_id
            assert answer.json()["code"] == "job_not_found"


def test_status_is_shown_again_after_a_release(api, engine):
    job_id = api.submit()
    stream = Stream(api, job_id)
    until(lambda: stream.events)
    engine.claim_one(job_id)
    engine.write(job_id)
    until(lambda: stream.tokens)
    engine.store.release(engine.info.engine_id, engine.incarnation, [engine.held.pop(job_id)], affinity=True)
    until(lambda: stream.names[-1] == "queued")
    engine.claim_one(job_id)
    until(lambda: stream.names[-1] == "in_progress")
    engine.write(job_id, end="stop")
    assert stream.wait().names == ["queued", "in_progress", "queued", "in_progress", "done"]
    assert api.job(job_id)["status"] == JobStatus.COMPLETED


def take(api, job_id, cursor, last_id):
    """The ids of token events from ``cursor`` on, from a client that goes away without a word after ``last_id``, or at once."""
    ids: list[int] = []
    with api.client.stream("GET", f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": str(cursor)}) as response:
        assert response.status_code == 200
        if last_id is not None:
            for event in parse_events(response.iter_lines()):
                if event.name == "token":
                    ids.append(int(event.id))
                if ids and ids[-1] == last_id:
                    break
    return ids


def test_a_client_that_drops_at_every_event_and_comes_back_with_any_cursor(api, engine):
    """A stream that broke before its first event was resumed from the start elsewhere: the client's cursor must not get lost."""
    rng = random.Random(5)
    job_id = api.submit()
    readers = [Stream(api, job_id) for _ in range(5)]
    until(lambda: all(reader.events for reader in readers))
    assert api.metric("open_streams") == len(readers)
    engine.claim_one(job_id)
    for length in range(1, 65):
        engine.write(job_id, end="length" if length == 64 else "")
        assert take(api, job_id, length - 1, length) == [length]
        take(api, job_id, length, None)  # drops again, before the first event
        old = rng.randrange(length)
        assert take(api, job_id, old, length) == list(range(old + 1, length + 1))
        for cursor, code in ((length + 2, "cursor_ahead"), (f"{length}x", "invalid_cursor")):
            answer = api.client.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": str(cursor)})
            assert (answer.status_code, answer.json()["code"]) == (400, code)
    for reader in readers:
        assert reader.wait().tokens == TOKENS
    assert collect(api, job_id, "64")[-1].name == "done"
    until(lambda: api.metric("open_streams") == 0)
