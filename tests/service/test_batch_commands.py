"""``midsentence batch ...`` against a real api and a scripted engine."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from tests.service.api.conftest import model, model_folder, new_memory_store  # noqa: F401
from tests.service.api.rig import MODEL, PROMPT, ScriptedEngine, running_api, until


def lines(count, **body):
    return "".join(
        json.dumps(
            {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": PROMPT, **body}}
        )
        + "\n"
        for i in range(count)
    )


class Place:
    def __init__(self, api, directory):
        self.api, self.directory = api, directory
        self.file, self.out = directory / "in.jsonl", directory / "out.jsonl"
        self.errors = directory / "out.jsonl.errors"
        self.file.write_text(lines(5))

    def begin(self, *arguments):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MIDSENTENCE_")}
        return subprocess.Popen(
            [sys.executable, "-m", "service.cli", "batch", *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**environment, "MIDSENTENCE_URL": self.api.url},
        )  # fmt: skip

    def batch(self, *arguments):
        process = self.begin(*arguments)
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err

    def batches(self):
        return self.api.client.get("/v1/batches").json()["data"]


@pytest.fixture
def place(model, tmp_path):  # noqa: F811
    with running_api(new_memory_store(), model) as api:
        yield Place(api, tmp_path)


@pytest.fixture
def engine(place):
    """Ends every job with one token."""
    scripted, stop = ScriptedEngine(place.api.source.store), threading.Event()

    def run():
        while not stop.wait(0.01):
            for job_id in scripted.claim():
                scripted.write(job_id, end="stop")
                del scripted.held[job_id]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join(10)


def test_answers_come_into_the_file_and_a_second_run_finds_them(place, engine):
    code, out, err = place.batch("run", place.file, "-o", place.out)
    assert (code, out.strip()) == (0, str(place.out)), err
    assert "5 answers, 0 failed" in err
    first = place.out.read_text()
    assert [json.loads(line)["custom_id"] for line in first.splitlines()] == [f"r{i}" for i in range(5)]
    place.out.unlink()
    assert place.batch("run", place.file, "-o", place.out)[0] == 0
    assert place.out.read_text() == first
    assert len(place.batches()) == 1
    assert place.batch("run", place.file, "-o", place.out, "--new")[0] == 0
    assert len(place.batches()) == 2
    assert sorted(path.name for path in place.directory.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_ctrl_c_leaves_it_running_and_says_how_to_go_on(place):
    waiting = place.begin("run", place.file, "-o", place.out)
    until(lambda: place.api.metric('http_requests_total{code="200",method="GET",route="/v1/batches/{batch_id}"}'), 60)  # it waits
    waiting.send_signal(signal.SIGINT)
    _, err = waiting.communicate(timeout=30)
    (batch,) = place.batches()
    assert waiting.returncode == 130
    assert f"midsentence batch run {place.file} -o {place.out}" in err
    assert f"midsentence batch cancel {batch['id']}" in err
    assert batch["status"] in ("validating", "in_progress")
    code, out, _ = place.batch("cancel", batch["id"])
    assert (code, out.split()[0]) == (0, batch["id"])
    until(lambda: place.batches()[0]["status"] == "cancelled")
    code, _, err = place.batch("run", place.file, "-o", place.out)
    assert code == 1
    assert "cancelled: 0 answers, 5 failed" in err
    assert [json.loads(line)["error"]["code"] for line in place.errors.read_text().splitlines()] == ["batch_cancelled"] * 5


@pytest.mark.parametrize("anew", [[], ["--new"]])
def test_ctrl_c_before_the_api_answered_says_how_to_go_on(place, anew):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        sending = place.begin("run", place.file, "-o", place.out, "--url", url, *anew)
        caller, _ = silent.accept()
        with caller:
            assert caller.recv(1)
            sending.send_signal(signal.SIGINT)
            _, err = sending.communicate(timeout=30)
    assert sending.returncode == 130
    again = "Is it there: midsentence batch list" if anew else f"Go on with it: midsentence batch run {place.file} -o {place.out}"
    assert err == f"[what was sent is kept. {again}]\n"


def test_what_is_wrong_with_lines_is_said_by_line(place):
    place.file.write_text(lines(2) + "no json\n")
    code, _, err = place.batch("run", place.file, "-o", place.out)
    assert code == 1
    assert "line 3: " in err
    assert "invalid_json_line" in err
    assert not place.out.exists()


def test_a_file_that_is_no_input_is_refused_before_it_is_sent(place):
    place.file.write_text("prompt\n")
    code, _, err = place.batch("run", place.file, "-o", place.out)
    assert code == 78
    assert "the first line" in err
    assert place.batches() == []


def test_list_show_and_download(place, engine):
    assert place.batch("run", place.file, "-o", place.out)[0] == 0
    (batch,) = place.batches()
    for command in (("list",), ("show", batch["id"])):
        code, out, _ = place.batch(*command)
        assert code == 0
        assert batch["id"] in out
        assert "completed" in out
    assert json.loads(place.batch("show", batch["id"], "--json")[1])["request_counts"]["completed"] == 5
    other = place.directory / "other.jsonl"
    assert place.batch("download", batch["id"], "-o", other)[0] == 0
    assert other.read_text() == place.out.read_text()
    code, _, err = place.batch("show", "batch_unknown")
    assert (code, "no such batch" in err) == (1, True)
