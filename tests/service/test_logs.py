"""Log lines: one JSON object each, with ids, without anybody's words."""

import io
import json
import logging

import pytest
import structlog

from service import logs


@pytest.fixture
def lines():
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.configure("info", "json", process="engine", stream=stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:] = before
    root.setLevel(level)
    structlog.reset_defaults()


def test_ids_are_on_every_line_written_while_they_are_bound(lines):
    with logs.bound(job_id="job_1", request_id="req_1"):
        logs.get_logger("engine").info("began", tokens=3)
        logging.getLogger("some.library").warning("odd: %d", 7)
    logs.get_logger("engine").info("after")
    first, library, after = lines()
    assert (first["event"], first["job_id"], first["request_id"], first["tokens"]) == ("began", "job_1", "req_1", 3)
    assert (first["logger"], first["process"], first["level"]) == ("midsentence.engine", "engine", "info")
    assert (library["event"], library["job_id"]) == ("odd: 7", "job_1")
    assert "job_id" not in after
    assert list(first)[:4] == ["timestamp", "level", "logger", "event"]


def test_what_people_wrote_is_withheld(lines):
    logs.get_logger("api").info("submitted", prompt="my secret", token_ids=[1, 2], authorization="Bearer x", size=9)
    [line] = lines()
    assert "secret" not in json.dumps(line)
    assert "Bearer" not in json.dumps(line)
    assert (line["prompt"], line["token_ids"], line["size"]) == ("<withheld, 9 long>", "<withheld, 2 long>", 9)


def test_exceptions_come_with_their_traceback_and_without_locals(lines):
    prompt = "my secret"
    try:
        raise ValueError("bad")
    except ValueError:
        logs.get_logger("api").exception("failed")
    [line] = lines()
    assert "ValueError: bad" in line["exception"]
    assert prompt not in json.dumps(line)


def test_levels_hold_for_libraries_too(lines):
    logs.get_logger("engine").debug("quiet")
    logging.getLogger("httpx").info("GET https://example")
    logging.getLogger("uvicorn.error").info("Application startup complete.")
    assert lines() == []
