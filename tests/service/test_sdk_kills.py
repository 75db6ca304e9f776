"""OpenAI's own SDK against a real service whose engine, api and Redis are killed in the middle of everything that takes a while.

All of ``sdk_calls`` are made at once, first undisturbed, then with the kills: each call is in the middle at each of them.
"""

import functools
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from chaos.cluster import Cluster
from chaos.place import ClusterOptions
from tests.service.api.chat_models import QWEN3
from tests.service.sdk_calls import CALLS, CHAT, PROMPT, TOKENS, Code, key, model
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(400)  # the first test waits for all calls of all

ROLES = ("engine", "api", "redis")  #: in the order in which they are killed
FURTHER = 15  #: tokens that each call is shown between two kills
STEP = 0.05  #: seconds: an api is back before TOKENS are made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Slow, of a model that talks until its tokens run out and whose template has tools."""
    place = tmp_path_factory.mktemp("kills")
    folder = make_tiny_model(place / "tiny", eos_token_id=None, max_position_embeddings=1024)
    (folder / "chat_template.jinja").write_text(QWEN3.replace("</think>", ""))  # as of a model that does not reason
    slow = {"failpoints": f"worker.after_step=sleep:{STEP}@*"}
    with Cluster(place / "c", ClusterOptions(str(folder), device_pages=1000, host_pages=2000, settings=slow)) as running:
        running.serve()
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="module")
def requests():
    """(method, path) of all that was asked for."""
    return set()


@pytest.fixture(scope="module")
def client(cluster, requests):
    def note(request):
        requests.add((request.method, request.url.path))

    by = openai.DefaultHttpxClient(event_hooks={"request": [note]})
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=120, max_retries=10, http_client=by) as sdk:
        yield sdk


class Readers:
    """All calls at once, each in a thread of its own."""

    def __init__(self, pool, client):
        self._shown = dict.fromkeys(CALLS, 0)
        self._last = dict.fromkeys(CALLS, 0)
        self.answers = {name: pool.submit(call, client, functools.partial(self._seen, name)) for name, call in CALLS.items()}

    def _seen(self, name, tokens):
        self._shown[name] = max(self._shown[name], tokens)

    def further(self):
        """Wait until each was shown more than at the last kill. None may have ended: then the kill would prove nothing."""
        deadline = time.monotonic() + 90
        while waiting := [name for name in CALLS if self._shown[name] < min(self._last[name] + FURTHER, TOKENS)]:
            assert time.monotonic() < deadline, waiting
            self._check_none_ended()
            time.sleep(0.02)
        self._check_none_ended()
        self._last = dict(self._shown)

    def _check_none_ended(self):
        for name, answer in self.answers.items():
            if answer.done():
                raise AssertionError(f"{name} ended before it was to be disturbed") from answer.exception()


@pytest.fixture(scope="module")
def undisturbed(client):
    with ThreadPoolExecutor(len(CALLS)) as pool:
        return Readers(pool, client).answers


@pytest.fixture(scope="module")
def disturbed(cluster, client, undisturbed):
    for answer in undisturbed.values():
        answer.result()
    before = {job["id"] for job in jobs(cluster)}
    with ThreadPoolExecutor(len(CALLS)) as pool:
        readers = Readers(pool, client)
        for role in ROLES:
            readers.further()
            cluster.signal(role, signal.SIGKILL)
    new = [job for job in jobs(cluster) if job["id"] not in before]
    assert len(new) == len(before), "a request that was sent again made a job of its own"
    assert [job["id"] for job in new if job["recovery"]["count"] < 1] == []
    return readers.answers


def jobs(cluster):
    return httpx.get(f"{cluster.url}/v1/jobs", params={"limit": 100}, trust_env=False, timeout=30).json()["data"]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_answered_as_if_nothing_had_died(undisturbed, disturbed, name):
    assert disturbed[name].result() == undisturbed[name].result()


def test_all_that_is_offered_is_there_after_the_kills(cluster, client, disturbed, requests):
    """With the calls above every operation of the OpenAI surface was driven; the api's own description says which there are."""
    responses(client)
    chats(client)
    files_and_batches(client)
    assert client.models.retrieve(model(client)).id == model(client)
    described = httpx.get(f"{cluster.url}/openapi.json", trust_env=False).json()["paths"]
    offered = {
        (method.upper(), path)
        for path, operations in described.items()
        for method, operation in operations.items()
        if "openai" in operation["tags"]
    }
    assert len(offered) > 20
    assert {(method, path) for method, path in offered if not any(driven(path, *one, method) for one in requests)} == set()


def driven(path, used_method, used_path, method):
    return used_method == method and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", path), used_path)


def responses(client):
    first = client.responses.parse(input=PROMPT, text_format=Code, store=True)
    assert first.output_parsed is not None
    second = client.responses.create(input="And then?", previous_response_id=first.id, background=True, max_output_tokens=TOKENS)
    assert client.responses.cancel(second.id).status == "cancelled"
    items = client.responses.input_items.list(second.id, order="asc")
    assert [item.content[0].text for item in items] == [PROMPT, first.output_text, "And then?"]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def chats(client):
    one, other = client.chat.completions.list(order="desc")  # of the run with the kills, and of the one without
    assert one.choices == client.chat.completions.retrieve(one.id).choices
    assert [message.content for message in client.chat.completions.messages.list(one.id)] == [CHAT[0]["content"]]
    assert client.chat.completions.update(one.id, metadata={"a": "b"}).metadata == {"a": "b"}
    assert client.chat.completions.retrieve(one.id).metadata == {"a": "b"}
    assert client.chat.completions.delete(one.id).deleted
    assert [stored.id for stored in client.chat.completions.list()] == [other.id]


def files_and_batches(client):
    of_batches = {batch.input_file_id for batch in client.batches.list()}
    assert {file.id for file in client.files.list()} == of_batches
    assert len(of_batches) == 6
    file = client.files.retrieve(of_batches.pop())
    assert client.files.wait_for_processing(file.id) == file
    made = client.batches.create(
        input_file_id=file.id, endpoint=endpoint_of(client, file), completion_window="24h", extra_headers=key()
    )
    assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def endpoint_of(client, file):
    return re.search(r'"url": "([^"]+)"', client.files.content(file.id).text)[1]
