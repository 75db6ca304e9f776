"""The event stream of a response: the same events with the same numbers for everybody, whenever they come and from wherever."""

import json
import threading
from contextlib import contextmanager
from dataclasses import replace

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.openai.response_answers import ResponseShape
from service.api.openai.response_events import HEAD, TAIL, ResponseEvents, last_number
from service.api.openai.surface import RequestJobs
from service.api.reader import Progress
from storage.job_spec import JobSpec
from storage.records import JobError, JobRecord, JobStatus, LogEntry
from tests.service.api.calls import in_thread
from tests.service.api.rig import DIRECT, MODEL, running_api, until

HEAD_TYPES = [
    "response.created", "response.queued", "response.in_progress", "response.output_item.added", "response.content_part.added",
]  # fmt: skip
TAIL_TYPES = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
DELTA = "response.output_text.delta"


def background(sdk, **more):
    return sdk.responses.create(**{"model": MODEL, "input": "hello", "background": True, **more})


def replayed(sdk, response_id, **more):
    return [event.to_dict() for event in sdk.responses.retrieve(response_id, stream=True, **more)]


# --- what the SDK sees ---------------------------------------------------------------------------------------------------


def test_a_stream_from_beginning_to_end(sdk, engine):
    stream = sdk.responses.create(model=MODEL, input="hello", stream=True)
    events = [next(stream), next(stream)]
    response_id = events[0].response.id
    engine.claim_one(response_id)
    engine.write(response_id, tokens=2)
    engine.write(response_id, end="stop")
    events += list(stream)
    assert [event.type for event in events] == [*HEAD_TYPES, DELTA, DELTA, DELTA, *TAIL_TYPES, "response.completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.response.status for event in events[:3]] == ["queued", "queued", "in_progress"]
    assert [(event.response.output, event.response.usage) for event in events[:3]] == [([], None)] * 3
    assert [event.delta for event in events[5:8]] == ["t0 ", "t1 ", "t2 "]
    text_done, part_done, item_done, completed = events[8:]
    assert text_done.text == part_done.part.text == item_done.item.content[0].text == completed.response.output_text == "t0 t1 t2 "
    assert (item_done.item.status, completed.response.usage.output_tokens) == ("completed", 3)
    assert {event.item_id for event in events[4:10]} == {item_done.item.id}
    assert completed.response == sdk.responses.retrieve(response_id)
    assert replayed(sdk, response_id) == [event.to_dict() for event in events]


def test_the_helper_of_the_sdk(sdk, engine):
    with sdk.responses.stream(model=MODEL, input="hello") as stream:
        response_id = next(stream).response.id
        engine.claim_one(response_id)
        engine.write(response_id, tokens=2, end="stop")
        final = stream.get_final_response()
    assert (final.id, final.output_text) == (response_id, "t0 t1 ")
    with sdk.responses.stream(response_id=response_id, starting_after=5) as stream:
        events = list(stream)
        assert [event.sequence_number for event in events] == list(range(6, HEAD + 2 + TAIL))
        assert (events[0].delta, events[0].snapshot) == ("t1 ", "t0 t1 ")
        assert stream.get_final_response() == final
    wait = in_thread(lambda: sdk.responses.parse(model=MODEL, input="hello"))
    engine.write(until(engine.claim)[0], end="stop")
    assert wait().output_text == "t0 "


def test_the_head_comes_as_it_comes_to_pass(sdk, engine):
    made = background(sdk)
    stream = iter(sdk.responses.retrieve(made.id, stream=True))
    assert [next(stream).type for _ in range(2)] == HEAD_TYPES[:2]
    wait = in_thread(lambda: [next(stream).type for _ in range(3)])
    engine.claim_one(made.id)
    assert wait() == HEAD_TYPES[2:]
    engine.write(made.id, end="stop")
    assert list(stream)[-1].type == "response.completed"


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_cancelled_stream_ends_as_failed_and_says_cancelled(sdk, engine, tokens):
    stream = background(sdk, stream=True)
    response_id = next(stream).response.id
    if tokens:
        engine.claim_one(response_id)
        engine.write(response_id, tokens=tokens)
    sdk.responses.cancel(response_id)
    *_, item, last = stream
    assert (last.type, last.response.status, last.response.error) == ("response.failed", "cancelled", None)
    assert (item.type, item.item.status) == ("response.output_item.done", "incomplete")
    assert last.sequence_number == HEAD + tokens + TAIL - 1
    assert last.response == sdk.responses.retrieve(response_id)


def test_a_failed_stream(sdk, engine):
    stream = background(sdk, stream=True)
    response_id = next(stream).response.id
    engine.claim_one(response_id)
    engine.write(response_id)
    engine.fail(response_id, "poison", "three crashes")
    *_, last = stream
    assert (last.type, last.response.error.message) == ("response.failed", "poison: three crashes")


def test_an_incomplete_stream(sdk, engine):
    with sdk.responses.stream(model=MODEL, input="hello") as stream:
        response_id = next(stream).response.id
        engine.claim_one(response_id)
        engine.write(response_id, end="length")
        *_, last = stream
    assert (last.type, last.response.incomplete_details.reason) == ("response.incomplete", "max_output_tokens")


def test_logprobs_of_tokens_without_text_come_with_the_next_text(sdk, engine, model):
    stream = background(sdk, stream=True, include=["message.output_text.logprobs"], top_logprobs=1)
    response_id = next(stream).response.id
    engine.claim_one(response_id)
    engine.write(response_id, tokens=5, texts=["a", "", "", "b", ""], end="stop")
    events = list(stream)
    deltas = [event for event in events if event.type == DELTA]
    done = next(event for event in events if event.type == "response.output_text.done")
    names = [model.tokenization.token_text(100 + index) for index in range(4)]
    assert [(event.delta, [found.token for found in event.logprobs]) for event in deltas] == [("a", names[:1]), ("b", names[1:])]
    assert [found.token for found in done.logprobs] == names
    assert [found.token for found in events[-1].response.output[0].content[0].logprobs] == names


def test_a_deleted_response_ends_its_streams_with_an_error(sdk, engine):
    stream = background(sdk, stream=True)
    response_id = next(stream).response.id
    engine.claim_one(response_id)
    engine.write(response_id)
    assert [next(stream).type for _ in range(5)][-1] == DELTA
    sdk.responses.delete(response_id)
    (last,) = stream
    assert (last.type, last.code, last.sequence_number) == ("error", "gone", 6)


# --- positions -----------------------------------------------------------------------------------------------------------


def test_a_stream_goes_on_behind_any_event(sdk, engine):
    made = background(sdk)
    engine.claim_one(made.id)
    engine.write(made.id, tokens=4, texts=["a", "", "b", "c"])
    engine.write(made.id, end="stop")
    whole = replayed(sdk, made.id)
    for after in range(len(whole)):
        assert replayed(sdk, made.id, starting_after=after) == whole[after + 1 :]
    assert replayed(sdk, made.id, starting_after=10**14) == []


def test_behind_the_log_of_a_running_response_is_no_position(api, sdk, engine):
    """A token without text is no event: the log is longer than the events say."""
    made = background(sdk)
    stream = sdk.responses.retrieve(made.id, stream=True, starting_after=HEAD - 1)
    engine.claim_one(made.id)
    engine.write(made.id, tokens=3, texts=["a", "", "b"])
    assert [next(stream).sequence_number for _ in range(2)] == [5, 6]
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.responses.retrieve(made.id, stream=True, starting_after=7)
    assert (caught.value.code, caught.value.param) == ("cursor_ahead", "starting_after")
    tail = sdk.responses.retrieve(made.id, stream=True, starting_after=6)
    engine.write(made.id, texts=["c"], end="stop")
    assert next(tail).delta == next(stream).delta == "c"
    assert api.metric("stream_resumes_total") == 2
    assert len(list(stream)) == len(list(tail)) == TAIL


# --- bytes ---------------------------------------------------------------------------------------------------------------


@contextmanager
def lines_of(api, response_id):
    """The bytes of a stream as they come, and the end of it."""
    lines: list[str] = []

    def read():
        url = f"{api.url}/v1/responses/{response_id}?stream=true"
        with httpx.Client(**DIRECT, timeout=20) as client, client.stream("GET", url) as response:
            lines.extend(response.iter_lines())  # one by one, as they come

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    yield lines
    thread.join(20)
    assert not thread.is_alive()


def test_keep_alive_and_recovery_are_comments_that_disturb_no_sdk(store, model, engine):
    with (
        running_api(store, model, keep_alive=0.02) as api,
        openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        made = background(sdk)
        engine.claim_one(made.id)
        engine.write(made.id)
        stream = sdk.responses.retrieve(made.id, stream=True)
        events = [next(stream) for _ in range(HEAD + 1)]
        with lines_of(api, made.id) as lines:
            until(lambda: ": ping" in lines)
            engine.register()
            engine.write(made.id, tokens_replayed=1, pages_restored=2)
            engine.write(made.id, end="stop")
            events += list(stream)
    assert ': recovered {"count": 1, "tokens_replayed": 1, "pages_restored": 2}' in lines
    assert {line.partition(":")[0] for line in lines} == {"event", "data", ""}
    assert "".join(event.delta for event in events if event.type == DELTA) == "t0 t1 t2 "
    assert [event.sequence_number for event in events] == list(range(HEAD + 3 + TAIL))


# --- for every log, every end, every way of reading it, every position ------------------------------------------------------

ENTRIES = st.lists(
    st.builds(LogEntry, st.integers(0, 500), st.sampled_from(["", "a", "ß ", "\n\n", "data: x", "\u2028"])), max_size=12
).map(tuple)
ENDINGS = st.sampled_from(
    [
        (JobStatus.COMPLETED, "stop", None),
        (JobStatus.INCOMPLETE, "length", None),
        (JobStatus.FAILED, "", JobError("poison", "three crashes")),
        (JobStatus.CANCELLED, "", None),
    ]
)


class Heard(RequestJobs):
    def __init__(self):
        super().__init__(["resp_1"], None)


def record_of(entries, status, reason="", error=None, parts=None, **more):
    """``parts``: None is a response of the first versions."""
    echo = {"background": True, "store": True, "instructions": None}
    request = {"items": [], "echo": echo, **({"parts": parts} if parts is not None else {})}
    spec = JobSpec("tiny", 64, 1, kind="response", request=request)
    return JobRecord(
        "resp_1", spec.to_json(), (1, 2, 3), "f", 64, status, 1, log_length=len(entries), finish_reason=reason, error=error,
        created_at=100.0, started_at=101.0 if entries else None, finished_at=103.0 if status.terminal else None, **more,
    )  # fmt: skip


def stream_of(context, model, entries, cuts, ending, after=None, parts=None):
    """Numbered events of one reader. ``cuts``: log lengths at which it looks; the last look is at the end."""
    events = ResponseEvents(context, ResponseShape(model), Heard(), after)
    begun = [JobStatus.QUEUED, JobStatus.IN_PROGRESS]
    looks = [record_of(entries[:cut], begun[cut > 0], parts=parts) for cut in sorted(cuts)]
    looks.append(record_of(entries, *ending, parts=parts))
    events.open(looks[0])
    said, position = b"", 0
    for record in looks:
        assert not events.ended
        said += events.render(Progress(record, position, entries[position : record.log_length]))
        position = record.log_length
    assert events.ended
    return [json.loads(line.removeprefix(b"data: ")) for line in said.split(b"\n") if line.startswith(b"data: ")]


@given(data=st.data(), entries=ENTRIES, ending=ENDINGS)
def test_what_follows_any_event_is_the_same_for_every_reader(refusing_api, model, data, entries, ending):
    context = refusing_api.context
    places = st.lists(st.integers(0, len(entries)), max_size=4)
    whole = stream_of(context, model, entries, [], ending)
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert len(whole) == HEAD + sum(1 for entry in entries if entry.text) + TAIL
    assert last_number(ResponseShape(model), record_of(entries, *ending), entries) == len(whole) - 1
    assert "".join(event["delta"] for event in whole if event["type"] == DELTA) == "".join(entry.text for entry in entries)
    for after in range(len(whole) + 1):
        cuts = data.draw(places)
        assert stream_of(context, model, entries, cuts, ending, after) == whole[after + 1 :]


PARTS = {"dialect": "hermes", "tools": ["f"], "max_calls": None, "reasons": True, "thinking": False}
CALL_PIECES = ["<tool_call>", '{"name": "f", "arguments": ', '{"a": ', "1", "}", "</tool_call>"]
PART_TEXTS = st.sampled_from(["", "a ", "\n", "<think>", "hm", "</think>", "<", *CALL_PIECES]).map(lambda text: [text])
PART_ENTRIES = st.lists(PART_TEXTS | st.just(CALL_PIECES), max_size=8).map(
    lambda runs: tuple(LogEntry(5, text) for texts in runs for text in texts)
)


@given(data=st.data(), entries=PART_ENTRIES, ending=ENDINGS, thinking=st.booleans())
def test_what_follows_any_event_is_the_same_where_an_answer_has_parts(refusing_api, model, data, entries, ending, thinking):
    parts, context = {**PARTS, "thinking": thinking}, refusing_api.context
    whole = stream_of(context, model, entries, [], ending, parts=parts)
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert [event["type"] for event in whole[:3]] == HEAD_TYPES[:3]
    record = record_of(entries, *ending, parts=parts)
    assert last_number(ResponseShape(model), record, entries) == len(whole) - 1
    output = ResponseShape(model).whole(record, entries)["output"]
    assert output
    assert [event["item"] for event in whole if event["type"] == "response.output_item.done"] == output
    assert [event["output_index"] for event in whole if event["type"] == "response.output_item.added"] == list(range(len(output)))
    for after in range(len(whole) + 1):
        cuts = data.draw(st.lists(st.integers(0, len(entries)), max_size=3))
        assert stream_of(context, model, entries, cuts, ending, after, parts) == whole[after + 1 :]


@pytest.mark.parametrize("parts", [None, PARTS], ids=["plain", "with parts"])
@given(entries=ENTRIES | PART_ENTRIES, ending=ENDINGS, cut=st.integers(0, 12))
def test_no_event_that_was_seen_is_a_position_ahead_of_the_log(refusing_api, model, parts, entries, ending, cut):
    """Whoever saw an event comes back with its number to a log that is as long, or longer."""
    cut = min(cut, len(entries))
    running = record_of(entries[:cut], JobStatus.IN_PROGRESS, parts=parts)
    events = ResponseEvents(refusing_api.context, ResponseShape(model), Heard())
    events.open(running)
    seen = events.render(Progress(running, 0, entries[:cut])).count(b"\ndata: ")
    for later in range(cut, len(entries) + 1):
        now = replace(running, log_length=later, status=JobStatus.QUEUED)  # released, and not yet taken again
        assert seen - 1 <= last_number(ResponseShape(model), now, entries[:later])
