"""Bytes and texts that nobody meant: what is read back is what was written, or refused by its own error."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from storage import failpoints, pool_header
from storage.codec import (
    engine_fields,
    engine_record,
    group_arguments,
    job_record,
    page_entry,
    page_text,
    pairs,
)
from storage.errors import PoolError
from storage.pool_file import read_pool_header
from storage.records import EngineInfo, EngineRecord, JobAnswer, LogEntry, LogRead, NewJob, PageEntry
from tests.profiles import examples
from tests.storage.backends import commit_of, new_job

# --- the header of the pool file -----------------------------------------------------------------------------------------

NAMES = st.sampled_from(["__metadata__", "kv_pages", "format", "dtype", "shape", "data_offsets", "version", "pool_id", "num_pages"])
NUMBERS = st.integers(-2, 9) | st.integers() | st.sampled_from([2**63, 10**4299, 0.0, 1e300])
SIMPLE = st.none() | st.booleans() | NUMBERS | st.text(st.characters(), max_size=5) | st.sampled_from(["F32", "float16", "[1]"])
VALUES = st.recursive(SIMPLE, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6)
GEOMETRIES = st.fixed_dictionaries(
    {
        "pool_id": st.text("0123456789abcdef", min_size=1, max_size=32),
        "model_fingerprint": st.text("0123456789abcdef", max_size=32),
        "num_pages": st.integers(1, 5),
        "page_shape": st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple),
        "dtype": st.sampled_from(["float32", "float16", "bfloat16"]),
    }
)


def places(value, path=()):
    """Every place in a JSON value, as the steps that lead there."""
    yield path
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        yield from places(inner, (*path, step))


def changed(header, path, value):
    """``value`` at ``path``; the ellipsis takes away what is there."""
    made = copy.deepcopy(header)
    at = made
    for step in path[:-1]:
        at = at[step]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return made


@st.composite
def damaged(draw, text):
    """A header's JSON with holes, doubles, other values, flipped bits, cut or lengthened."""
    header = json.loads(text)
    for _ in range(draw(st.integers(0, 2))):
        path = draw(st.sampled_from([path for path in places(header) if path]))
        header = changed(header, path, draw(VALUES | st.just(...)))
    made = json.dumps(header)
    if draw(st.booleans()):
        name = draw(NAMES)
        made = made.replace(f'"{name}"', f'"{name}": {json.dumps(draw(VALUES))}, "{name}"', 1)
    blocks = draw(st.integers(1, 2))
    raw = made.encode().ljust(blocks * pool_header.ALIGNMENT - 8)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, len(made) - 1))
        raw = raw[:at] + bytes([raw[at] ^ 1 << draw(st.integers(0, 7))]) + raw[at + 1 :]
    return raw[: len(raw) - draw(st.sampled_from([0, 0, 0, 0, 1, 4096]))]


@settings(max_examples=examples(400))
@given(data=st.data(), geometry=GEOMETRIES)
def test_a_pool_header_is_one_that_we_would_have_written_or_is_refused(data, geometry, tmp_path_factory):
    built, head = pool_header.build(**geometry)
    text = data.draw(st.just(head[8:]) | damaged(head[8:].decode()))
    length = data.draw(st.just(len(text)) | st.integers(0, 2**64 - 1))
    size = data.draw(st.just(built.file_bytes) | st.integers(0, 2 * built.file_bytes))
    path = _file(tmp_path_factory, length.to_bytes(8, "little") + text, size)
    try:
        found = read_pool_header(path)
    except PoolError:
        assert (text, length, size) != (head[8:], built.data_offset - 8, built.file_bytes)
        return
    again, written = pool_header.build(
        pool_id=found.pool_id, model_fingerprint=found.model_fingerprint, num_pages=found.num_pages,
        page_shape=found.page_shape, dtype=found.dtype,
    )  # fmt: skip
    told, ours = json.loads(text), json.loads(written[8:])
    assert told["kv_pages"] == ours["kv_pages"]
    assert ours["__metadata__"].items() <= told["__metadata__"].items()
    assert size == found.data_offset + again.num_pages * again.page_bytes


@given(content=st.binary(max_size=200), size=st.integers(0, 1 << 20))
def test_any_bytes_are_no_pool(content, size, tmp_path_factory):
    with pytest.raises(PoolError):
        read_pool_header(_file(tmp_path_factory, content, size))


def test_numbers_too_long_to_be_shown_are_refused():
    """Python refuses to print more than 4300 digits: an error while telling of an error."""
    size = (10**4300 - 4) // 4
    _, head = pool_header.build(pool_id="p", model_fingerprint="m", num_pages=1, page_shape=(size,), dtype="float32")
    with pytest.raises(PoolError):
        pool_header.parse(head[8:], 1 << 20)


def _file(tmp_path_factory, content: bytes, size: int) -> Path:
    """Sparse: nothing is read of it but its header."""
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    with open(path, "wb") as file:
        file.write(content)
        file.truncate(size)
    return path


# --- records and logs ----------------------------------------------------------------------------------------------------

TEXT = st.text(max_size=12)  # all of Unicode but halves of surrogate pairs, which no detokenizer and no request lets through
TOKENS = st.integers(0, 2**31)
ENTRIES = st.lists(st.builds(LogEntry, TOKENS, TEXT, TEXT), min_size=1, max_size=4).map(tuple)


@given(
    job=st.builds(
        NewJob, job_id=TEXT, spec=TEXT, prompt_token_ids=st.lists(TOKENS, max_size=5).map(tuple), model_fingerprint=TEXT,
        max_tokens=st.integers(1, 2**40), request_hash=TEXT, priority=st.integers(-100, 100), tenant=TEXT, request_id=TEXT,
        traceparent=TEXT, group=TEXT, served_by=TEXT,
    )
)  # fmt: skip
def test_a_record_says_what_was_submitted(job):
    jobs, prompts, prompt, length, job_id, spec, chain, number, *shared = group_arguments([job])
    assert (jobs, prompts, number) == ("1", "1", "1")
    by_script = {
        "spec": spec,
        "chain": chain,
        "prompt": prompt,
        "prompt_length": length,
        "status": "queued",
        "order": "1",
        "created_at": "1.5",
    }
    record = job_record(job_id, {**pairs(shared), **by_script})
    for name in NewJob.__slots__:
        if name not in ("request_hash", "deadline_seconds", "idempotency_key"):
            assert getattr(record, name) == getattr(job, name), name


@given(
    info=st.builds(EngineInfo, TEXT, TEXT, TEXT, st.integers(1, 2**22), TEXT, TEXT, TEXT, *[st.integers(0, 2**40)] * 4, TEXT),
    beat=st.integers(0, 2**50),
    dead=st.booleans(),
)
def test_an_engine_record_says_what_was_registered(info, beat, dead):
    fields = {**engine_fields(info), "incarnation": "i", "beat": str(beat), "dead": str(int(dead))}
    assert engine_record(info.engine_id, fields, {"b", "a"}) == EngineRecord(info, "i", beat, dead, ("a", "b"))


@given(entry=st.builds(PageEntry, st.text("0123456789abcdef", min_size=1), st.integers(0, 2**64 - 1)))
def test_a_page_entry_is_read_as_written(entry):
    assert page_entry(page_text(entry)) == entry
    assert page_entry(page_text(entry)).age == 0.0, "written before it was noted"
    noted = page_entry(f"{page_text(entry)} 1000.500000", 1010.0)
    assert (noted, noted.age) == (entry, 9.5)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(ENTRIES, min_size=1, max_size=3))
@example(steps=[(LogEntry(0, "\0\r\n$1\r\n", '{"a":"\U0001f600"}'), LogEntry(2**31, "", ""))])
def test_a_log_gives_back_what_was_committed(store, engine, steps):
    """Through the wire, the scripts and the server's own storage."""
    job_id = f"job-{sum(store.counts().values())}"
    store.submit(new_job(job_id), queue_limit=10_000)
    engine.claim(held=tuple(job.job_id for job in engine.renew().owned))
    for entries in steps:
        commit = replace(commit_of(store.get(job_id), *(entry.token for entry in entries)), tokens=entries)
        assert engine.write(commit).commits == (JobAnswer.OK,)
    assert store.read([LogRead(job_id)])[0].entries == tuple(entry for entries in steps for entry in entries)
    assert [piece.entries for piece in store.read([LogRead(job_id, 1, 1)])] == [sum(steps, ())[1:2]]


# --- failpoints ----------------------------------------------------------------------------------------------------------

PARTS = st.builds(
    "{}={}{}".format,
    st.sampled_from(["commit.before_send", "x", "", "A"]),
    st.sampled_from(["kill", "stop", "exit", "raise", "sleep:1", "sleep:0.5", "sleep:" + "9" * 400, "sleep:", "burn"]),
    st.sampled_from(["", "@1", "@12", "@0", "@" + "9" * 5000, "@x"]),
)


@given(text=st.text(max_size=20) | st.lists(PARTS, max_size=3).map(";".join))
@example(text="x=kill@" + "9" * 5000)
@example(text="x=sleep:" + "9" * 400)
def test_failpoints_are_understood_or_refused(text):
    try:
        points = failpoints.parse(text)
    except RuntimeError:
        return
    for point in points.values():
        assert point.action in ("kill", "stop", "exit", "raise", "sleep")
        assert 0 <= point.argument < 1e9
        assert point.at >= 1
