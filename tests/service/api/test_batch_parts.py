"""However bytes are cut on their way, a form and a file's lines are the same."""

import asyncio
import contextlib
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.openai.batch_lines import read_lines
from service.api.openai.uploads import Form
from service.api.problems import InvalidRequest
from storage.batch_records import CHUNK, NewFile
from tests.service.api.conftest import new_memory_store

CONTENT = b"one\r\n--b\r\n--boundary-\r\ntwo\x00\xff--boundar"
FORM = (
    b'preamble\r\n--boundary\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--boundary\r\nContent-Disposition: form-data; name="file"; filename="a b.jsonl"\r\nContent-Type: x/y\r\n\r\n'
    + CONTENT
    + b"\r\n--boundary--\r\n"
)[10:]


@given(cuts=st.lists(st.integers(0, len(FORM)), max_size=20))
def test_a_form_is_the_same_however_it_is_cut(cuts):
    form, edges = Form(b"boundary"), sorted({0, *cuts, len(FORM)})
    for begin, end in pairwise(edges):
        form.feed(FORM[begin:end])
    assert form.ended
    assert (form.values, form.filename, bytes(form.pending)) == ({"purpose": "batch"}, "a b.jsonl", CONTENT)


@given(pieces=st.lists(st.binary(max_size=60) | st.sampled_from([b"--b\r\n", b"\r\n--b--", b"Content-Disposition:", b"\r\n\r\n"])))
def test_any_bytes_are_a_form_or_refused(pieces):
    form = Form(b"b")
    with contextlib.suppress(InvalidRequest):
        for piece in pieces:
            form.feed(piece)
    assert len(form.pending) <= sum(map(len, pieces))


def lines_of(content, number=1, position=0, limit=3 * CHUNK):
    store = new_memory_store()
    chunks = range(0, len(content), CHUNK)
    for at in chunks:
        store.batches.put_chunk("u", at // CHUNK, content[at : at + CHUNK], limit=1 << 30)
    file = store.batches.create_file(NewFile("f", "u", len(chunks), len(content), "", "n"), limit=1).record

    async def run(call):
        return call(store)

    context = SimpleNamespace(options=SimpleNamespace(max_body_bytes=limit), store=SimpleNamespace(run=run))

    async def read():
        return [line async for line in read_lines(context, file, number, position)]

    return asyncio.run(read())


LENGTHS = st.integers(0, 40) | st.integers(CHUNK - 3, CHUNK + 3) | st.integers(2 * CHUNK - 3, 2 * CHUNK + 3)


@given(lengths=st.lists(LENGTHS, min_size=1, max_size=6), ends=st.booleans())
def test_lines_are_found_across_chunks_and_from_any_line_on(lengths, ends):
    expected = [bytes([97 + i % 26]) * length for i, length in enumerate(lengths)]
    content = b"\n".join(expected) + (b"\n" if ends or not expected[-1] else b"")
    lines = lines_of(content)
    assert [line.content for line in lines] == expected
    assert [line.number for line in lines] == list(range(1, len(lines) + 1))
    for line in lines:
        assert lines_of(content, line.number + 1, line.end) == lines[line.number :]


@pytest.mark.parametrize("length", [100, 101, CHUNK, 3 * CHUNK])
def test_a_line_too_long_is_not_kept_and_the_next_is_found(length):
    first, second, third = lines_of(b"a\n" + b"x" * length + b"\nb", limit=100)
    assert (first.content, second.content is None, third.content) == (b"a", length > 100, b"b")
    assert (second.end, third.end) == (length + 3, length + 4)
