"""A real service, with keys, at debug level: what it writes to disk is its own, and what it logs tells nobody's words."""

import json
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from chaos.cluster import Cluster
from chaos.place import ClusterOptions
from service.api_keys import add_key

CANARY = "zwoelf-kanarienvoegel-2f9c"
#: A client's mistakes, each with the canary in another place: errors are logged, too.
MISTAKES = [
    {"content": f'{{"prompt": "{CANARY}"'},
    {"json": {"prompt": [CANARY]}},
    {"json": {"prompt": CANARY, "top_k": CANARY}},
    {"json": {"prompt": CANARY, CANARY: 1}},
    {"json": {"messages": [{"role": CANARY, "content": CANARY}]}},
    {"json": {"prompt": CANARY, "max_tokens": 10**9, "stop": [CANARY], "metadata": {"note": CANARY}}},
    {"json": {"prompt": CANARY}, "headers": {"Idempotency-Key": f"{CANARY} {CANARY}"}},
]


@pytest.fixture(scope="module")
def run(tiny_folder, tmp_path_factory):
    """(cluster, key, the text that was made, the ids of its tokens): still running, after a crash and a recovery.

    Started as carelessly as can be: every file open to all, and core dumps of any size.
    """
    place = tmp_path_factory.mktemp("private")
    key = add_key(place / "api-keys", "alice")
    options = ClusterOptions(str(tiny_folder), settings={"log_level": "debug", "api_keys_file": str(place / "api-keys")})
    umask, limits = os.umask(0), resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (limits[1], limits[1]))
    with Cluster(place / "c", options) as cluster:
        try:
            cluster.serve()
        finally:
            os.umask(umask)
            resource.setrlimit(resource.RLIMIT_CORE, limits)
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=cluster.url, headers=headers, timeout=60, trust_env=False) as client:
            for mistake in MISTAKES:
                more = mistake.get("headers", {})
                assert client.post("/v1/jobs", **{**mistake, "headers": {**headers, **more}}).status_code == 400
            body = {"prompt": CANARY * 12, "max_tokens": 200, "ignore_eos": True, "temperature": 0, "logprobs": 2}
            job_id = client.post("/v1/jobs", json=body, headers={"X-Request-Id": "the-request"}).json()["id"]
            killed = False
            with client.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
                for line in stream.iter_lines():
                    if line == "id: 60" and not killed:
                        cluster.signal("engine", signal.SIGKILL)
                        killed = True
            assert killed
            completion = {"model": os.path.basename(tiny_folder), "prompt": CANARY, "max_tokens": 4}
            assert client.post("/v1/completions", json=completion).status_code == 200
            output = client.get(f"/v1/jobs/{job_id}").json()["output"]
        yield cluster, key, output["text"], output["token_ids"]
        assert cluster.stop() == 0


def test_every_file_and_folder_is_ours_alone(run):
    cluster, *_ = run
    seen = set()
    for folder, folders, files in os.walk(cluster.main.data_dir):
        for name in (".", *folders, *files):
            status = os.lstat(os.path.join(folder, name))
            wanted = 0o700 if stat.S_ISDIR(status.st_mode) else 0o600
            assert stat.S_IMODE(status.st_mode) == wanted, (folder, name, oct(status.st_mode))
            assert not stat.S_ISLNK(status.st_mode)
            seen.add(name)
    assert {"pool.safetensors", "store.json", "api-store.json", "redis.log", "appendonlydir", "run", "engine.lock"} <= seen


def test_no_process_may_leave_a_core_dump(run):
    cluster, *_ = run
    for role in ("supervisor", "engine", "api", "redis"):
        limits = Path(f"/proc/{cluster.require_pid(role)}/limits").read_text()
        (line,) = (line for line in limits.splitlines() if line.startswith("Max core file size"))
        assert line.split()[4:6] == ["0", "0"], role


def test_no_log_tells_prompts_texts_tokens_or_keys(run):
    cluster, key, text, token_ids = run
    logs = [*cluster.logs.iterdir(), cluster.main.data_dir / "redis" / "redis.log"]
    told = "\n".join(path.read_text(errors="replace") for path in logs)
    assert '"level": "debug"' in told  # the level was on, and the requests were logged
    assert "the-request" in told
    assert CANARY not in told
    assert CANARY[:12] not in told
    assert key not in told
    assert key[3:20] not in told
    assert "Bearer ms" not in told
    assert len(text) > 100
    pieces = {text[i : i + 16] for i in range(0, len(text) - 16, 8)}
    assert not [piece for piece in pieces if piece in told or json.dumps(piece)[1:-1] in told]
    for joined in (", ", ",", " "):
        assert joined.join(map(str, token_ids[:5])) not in told


def test_the_commands_take_the_key_from_the_environment(run):
    cluster, key, *_ = run
    command = [sys.executable, "-m", "service.cli", "jobs", "list", "--json", "--url", cluster.url]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MIDSENTENCE_")}
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert "this needs an API key" in refused.stderr
    listed = subprocess.run(
        command, env=environment | {"MIDSENTENCE_API_KEY": key}, capture_output=True, text=True, timeout=60, check=True
    )
    assert sorted(job["status"] for job in json.loads(listed.stdout)["data"]) == ["completed", "incomplete"]


def test_metrics_of_the_engine_need_the_key_too(run):
    cluster, key, *_ = run
    metrics = f"http://127.0.0.1:{cluster.main.port}/metrics"
    assert httpx.get(metrics, trust_env=False).status_code == 401
    assert (
        "midsentence_tokens_lost_total 0.0" in httpx.get(metrics, headers={"Authorization": f"Bearer {key}"}, trust_env=False).text
    )
