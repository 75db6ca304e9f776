"""A batch while everything is killed: each line has its one answer, in order, as if nothing had happened."""

import json
import time

import openai
import pytest

from chaos.cluster import Cluster
from chaos.faults.signals import Kill, KillSupervisor
from chaos.models import model_for
from chaos.place import ClusterOptions
from chaos.processes import wait_until

LINES, KILLS = 2000, 10
ROLES = ("engine", "api", "redis", "supervisor", "engine", "api", "redis", "supervisor", "engine", "api")
ENDPOINT = "/v1/completions"


def line(i):
    body = {"model": "tiny-model", "prompt": f"Line {i} of the batch", "max_tokens": 1 + i % 4, "temperature": 0.8, "seed": i}
    return {"custom_id": f"request-{i}", "method": "POST", "url": ENDPOINT, "body": body}


CONTENT = b"".join(json.dumps(line(i)).encode() + b"\n" for i in range(LINES))  #: each line has one right answer


def begun(client, key):
    headers = {"Idempotency-Key": key}
    file = client.files.create(file=("in.jsonl", CONTENT), purpose="batch", extra_headers=headers)
    return client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h", extra_headers=headers).id


def retrieved(client, batch_id):
    """What is told while processes die: whatever it is, its counts fit."""
    try:
        batch = client.batches.retrieve(batch_id)
    except openai.APIError:
        return None
    counts = batch.request_counts
    assert counts.failed == 0
    assert counts.completed <= counts.total <= LINES
    return batch


def completed(client, batch_id):
    def look():
        batch = retrieved(client, batch_id)
        return batch is not None and batch.status == "completed"

    wait_until(look, 300, f"the end of {batch_id}", pause=0.2)
    return client.batches.retrieve(batch_id)


def answers(client, batch):
    """What of each output line follows from its input alone: not ids, times, and pages found."""

    def essence(line):
        return line["custom_id"], line["error"], line["response"]["status_code"], line["response"]["body"]["choices"]

    return [essence(json.loads(each)) for each in client.files.content(batch.output_file_id).text.splitlines()]


@pytest.mark.timeout(600)
def test_two_thousand_lines_and_ten_kills(tmp_path):
    model = model_for("tiny", tmp_path)
    with Cluster(tmp_path / "c", ClusterOptions(model, device_pages=256, host_pages=512)) as cluster:
        cluster.serve()
        client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=5, timeout=60)
        at = time.monotonic()
        quiet = completed(client, begun(client, "quiet"))
        print(f"uninterrupted: {time.monotonic() - at:.1f} s")
        expected = answers(client, quiet)
        assert [custom_id for custom_id, *_ in expected] == [f"request-{i}" for i in range(LINES)]

        at = time.monotonic()
        batch_id = begun(client, "killed")
        for role, goal in zip(ROLES, range(0, LINES, LINES // KILLS), strict=True):

            def so_far(goal=goal):
                batch = retrieved(client, batch_id)
                return batch is not None and batch.request_counts.completed >= goal

            wait_until(so_far, 120, f"{goal} lines", pause=0.02)
            fault = KillSupervisor() if role == "supervisor" else Kill(role)
            assert fault.apply(cluster).fired
            if role == "supervisor":
                cluster.serve()
        done = completed(client, batch_id)
        print(f"with {KILLS} kills: {time.monotonic() - at:.1f} s")
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (LINES, LINES, 0)
        assert answers(client, done) == expected
        assert cluster.verify()["findings"] == []
