"""Stored chat completions: listed, fetched, deleted, by OpenAI's SDK."""

import openai
import pytest

from service.api_keys import ApiKeys, add_key
from storage.records import NewJob
from tests.service.api.calls import claimed, in_thread
from tests.service.api.conftest import new_memory_store
from tests.service.api.rig import MODEL, ScriptedEngine, running_api

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


def made(sdk, engine, **asked):
    wait = in_thread(lambda: sdk.chat.completions.create(model=MODEL, messages=CHAT, **{"store": True, **asked}))
    job_id = claimed(engine)
    ids = [job_id, *(f"{job_id}-{i}" for i in range(1, asked.get("n", 1)))]
    for one in ids:
        engine.claim_one(one)
    engine.write(*ids, tokens=2, end="stop")
    return wait()


def test_what_was_stored_is_found_again(sdk, engine):
    answer = made(sdk, engine, n=2, metadata={"a": "b"})
    assert len(answer.choices) == 2
    assert sdk.chat.completions.retrieve(answer.id) == answer
    assert answer.metadata == {"a": "b"}


def test_the_messages_of_a_stored_one(sdk, engine):
    answer = made(sdk, engine)
    messages = list(sdk.chat.completions.messages.list(answer.id, limit=1))
    assert [(message.id, message.role, message.content) for message in messages] == [
        (f"{answer.id}-0", "system", "Be brief."),
        (f"{answer.id}-1", "user", "Hi"),
    ]
    assert messages[1].content_parts[0].text == "Hi"


def test_lists_hold_what_was_stored_and_asked_for(sdk, engine):
    first, second = made(sdk, engine, metadata={"a": "b", "c": "d"}), made(sdk, engine, metadata={"a": "x"}, n=2)
    made(sdk, engine, store=False)
    completions = sdk.chat.completions
    assert [one.id for one in completions.list(limit=1)] == [first.id, second.id]
    assert [one.id for one in completions.list(order="desc", limit=1)] == [second.id, first.id]
    assert [one.id for one in completions.list(metadata={"a": "b"})] == [first.id]
    assert [one.id for one in completions.list(model=MODEL, after=first.id)] == [second.id]
    assert list(completions.list(model="another")) == []


def test_a_deleted_one_is_gone_whole(sdk, engine, store):
    answer = made(sdk, engine, n=2)
    assert sdk.chat.completions.delete(answer.id).deleted
    assert [store.get(answer.id), store.get(f"{answer.id}-1")] == [None, None]
    with pytest.raises(openai.NotFoundError):
        sdk.chat.completions.delete(answer.id)


def test_what_is_not_stored_is_not_there(api, sdk, engine):
    unstored, job_id = made(sdk, engine, store=False).id, api.submit()
    for completion_id in (unstored, job_id, "chatcmpl-none", "*"):
        with pytest.raises(openai.NotFoundError):
            sdk.chat.completions.retrieve(completion_id)


def test_one_that_is_not_finished_or_failed_is_not_there(sdk, engine):
    wait = in_thread(lambda: sdk.chat.completions.create(model=MODEL, messages=CHAT, store=True))
    job_id = claimed(engine)
    with pytest.raises(openai.NotFoundError):
        sdk.chat.completions.retrieve(job_id)
    assert list(sdk.chat.completions.list()) == []
    engine.fail(job_id, "poison", "three crashes")
    with pytest.raises(openai.APIError):
        wait()
    with pytest.raises(openai.NotFoundError):
        sdk.chat.completions.retrieve(job_id)


def test_another_tenants_are_not_there(model, tmp_path):
    keys = {name: add_key(tmp_path / "keys", name) for name in ("alice", "bob")}
    store = new_memory_store()
    engine = ScriptedEngine(store)
    with running_api(store, model, keys=ApiKeys(tmp_path / "keys")) as api:
        alice, bob = (openai.OpenAI(base_url=f"{api.url}/v1", api_key=keys[name], max_retries=0) for name in ("alice", "bob"))
        answer = made(alice, engine)
        for call in (bob.chat.completions.retrieve, bob.chat.completions.delete, bob.chat.completions.messages.list):
            with pytest.raises(openai.NotFoundError):
                call(answer.id)
        assert list(bob.chat.completions.list()) == []
        assert alice.chat.completions.retrieve(answer.id) == answer
        alice.close()
        bob.close()


def test_metadata_can_be_replaced(api, sdk, engine):
    answer = made(sdk, engine, n=2, metadata={"a": "b"})
    updated = sdk.chat.completions.update(answer.id, metadata={"c": "d"})
    assert updated.metadata == {"c": "d"}
    assert updated == sdk.chat.completions.retrieve(answer.id)
    assert updated.choices == answer.choices
    assert [one.id for one in sdk.chat.completions.list(metadata={"c": "d"})] == [answer.id]
    assert list(sdk.chat.completions.list(metadata={"a": "b"})) == []
    assert api.job(answer.id)["metadata"] == {"c": "d"}
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.update(answer.id, metadata={"x" * 65: "d"})
    assert caught.value.param.startswith("metadata")
    with pytest.raises(openai.NotFoundError):
        sdk.chat.completions.update("chatcmpl-none", metadata={})


def test_a_list_holds_all_however_many_jobs_came_since(store, sdk, engine):
    answer = made(sdk, engine)
    jobs = [NewJob(f"job-{i}", "{}", (1,), "f" * 32, 1, "") for i in range(1100)]
    for job in jobs:
        store.submit(job, queue_limit=2000)
    assert [one.id for one in sdk.chat.completions.list(order="desc")] == [answer.id]


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after"), ("what=1", "what")],
)
def test_bad_queries_are_refused_by_name(refusing_api, query, param):
    answer = refusing_api.client.get(f"/v1/chat/completions?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
