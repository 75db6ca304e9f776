"""A real service whose api is killed while many clients wait: one Idempotency-Key makes one answer."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from chaos.cluster import Cluster
from chaos.place import ClusterOptions
from tests.service.api.rig import until

CLIENTS = 50
CHAT = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture(scope="module")
def cluster(tiny_folder, tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("chat") / "c", ClusterOptions(str(tiny_folder))) as cluster:
        cluster.serve()
        yield cluster
        assert cluster.stop() == 0


@pytest.fixture
def asked(tiny_folder):
    return {"model": os.path.basename(tiny_folder), "messages": CHAT, "max_tokens": 120, "temperature": 0, "seed": 5}


def test_fifty_clients_with_one_key_and_kills_get_one_answer(cluster, asked):
    """Their api dies while they wait, twice; each sends the same again, as the SDK does. The engine waits for the kills."""
    body = {**asked, "n": 2, "extra_headers": {"Idempotency-Key": "one"}, "extra_body": {"ignore_eos": True}}

    def ask(_):
        with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=30, timeout=120) as client:
            return client.chat.completions.create(**body).to_dict()

    with ThreadPoolExecutor(CLIENTS) as pool:
        cluster.signal("engine", signal.SIGSTOP)
        try:
            answers = [pool.submit(ask, i) for i in range(CLIENTS)]
            for _ in range(2):
                until(lambda: len(jobs(cluster)) == 2, seconds=60)
                old = cluster.signal("api", signal.SIGKILL)
                cluster.wait_changed("api", old)
            until(lambda: jobs(cluster), seconds=60)
            assert not any(answer.done() for answer in answers), "too early for a fault to count"
        finally:
            cluster.signal("engine", signal.SIGCONT)
        found = [answer.result() for answer in answers]
    assert all(answer == found[0] for answer in found)
    assert [choice["finish_reason"] for choice in found[0]["choices"]] == ["length", "length"]
    assert [job["group"] for job in jobs(cluster)] == [found[0]["id"]] * 2


def jobs(cluster):
    """The chat's jobs; none while the api is away."""
    try:
        listed = httpx.get(f"{cluster.url}/v1/jobs", params={"limit": 100}, trust_env=False, timeout=30).json()["data"]
    except httpx.TransportError:
        return []
    return [job for job in listed if job["id"].startswith("chatcmpl-")]
