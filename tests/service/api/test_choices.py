"""``n`` > 1: one request, one group of jobs, one choice for each."""

import time
from collections import defaultdict

import httpx
import openai
import pytest

from storage.errors import StoreUnavailable
from storage.job_spec import JobSpec
from storage.memory_store import MemoryJobStore
from tests.service.api.calls import in_thread
from tests.service.api.rig import DIRECT, MODEL, PROMPT, parse_events, running_api, text_of, until


def claimed_all(engine, n):
    """The n jobs of one request, in the order of their choices."""
    assert until(lambda: engine.claim()) == list(engine.held)
    assert len(engine.held) == n
    return list(engine.held)


def text(tokens):
    return "".join(map(text_of, range(tokens)))


def test_each_choice_is_a_job_of_one_group(api, sdk, engine, store):
    wait = in_thread(lambda: sdk.completions.create(model=MODEL, prompt=PROMPT, seed=41, n=3, best_of=3))
    ids = claimed_all(engine, 3)
    engine.write(ids[2], tokens=3, end="length", cached_tokens=3)
    engine.write(ids[0], tokens=1, cached_tokens=2)
    engine.write(ids[1], tokens=2, end="stop", cached_tokens=4)
    engine.write(ids[0], end="stop")
    answer = wait()
    shown = [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices]
    assert shown == [(0, text(2), "stop"), (1, text(2), "stop"), (2, text(3), "length")]
    assert ids == [answer.id, f"{answer.id}-1", f"{answer.id}-2"]
    assert [api.job(job_id)["group"] for job_id in ids] == [answer.id] * 3
    assert [JobSpec.from_json(store.get(job_id).spec).seed for job_id in ids] == [41, 42, 43]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 7, 11)
    assert usage.prompt_tokens_details.cached_tokens == 2


def test_the_largest_seed_goes_round(api, engine, store):
    body = {"model": MODEL, "prompt": PROMPT, "n": 2, "seed": (1 << 63) - 1}
    wait = in_thread(lambda: api.client.post("/v1/completions", json=body))
    ids = claimed_all(engine, 2)
    engine.write(*ids, end="stop")
    assert wait().status_code == 200
    assert [JobSpec.from_json(store.get(job_id).spec).seed for job_id in ids] == [(1 << 63) - 1, 0]


def test_choices_are_streamed_as_their_tokens_come(sdk, engine):
    options = {"include_usage": True}
    stream = sdk.completions.create(model=MODEL, prompt=PROMPT, n=3, logprobs=1, stream=True, stream_options=options)
    ids = claimed_all(engine, 3)
    chunks = []
    for choice in (0, 1, 2, 1, 0):
        engine.write(ids[choice])
        chunks.append(next(stream))
        assert chunks[-1].choices[0].index == choice
    engine.write(ids[1], end="stop")
    chunks += [next(stream), next(stream)]
    assert [(chunk.choices[0].index, chunk.choices[0].finish_reason) for chunk in chunks[-2:]] == [(1, None), (1, "stop")]
    engine.write(ids[0], ids[2], end="length")
    chunks += stream
    texts, reasons, offsets = defaultdict(str), {}, defaultdict(list)
    for (choice,) in (chunk.choices for chunk in chunks[:-1]):
        assert choice.index not in reasons
        texts[choice.index] += choice.text
        if choice.logprobs:
            offsets[choice.index] += choice.logprobs.text_offset
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == {0: text(3), 1: text(3), 2: text(2)}
    assert reasons == {0: "length", 1: "stop", 2: "length"}
    assert offsets == {0: [0, 3, 6], 1: [0, 3, 6], 2: [0, 3]}
    assert {chunk.id for chunk in chunks} == {ids[0]}
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert (chunks[-1].choices, chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == ([], 4, 8)


def test_a_stream_ends_once_and_after_the_last_choice(api, engine):
    body = {"model": MODEL, "prompt": PROMPT, "n": 2, "stream": True}
    wait = in_thread(lambda: api.client.post("/v1/completions", json=body))
    engine.write(*claimed_all(engine, 2), tokens=2, end="stop")
    lines = [line for line in wait().text.split("\n") if line]
    assert [line for line in lines if "DONE" in line] == lines[-1:] == ["data: [DONE]"]
    assert len(lines) == 7


@pytest.mark.parametrize("streamed", [False, True])
def test_when_its_client_goes_away_all_are_cancelled(api, store, engine, streamed):
    def leave():
        with httpx.Client(**DIRECT, timeout=0.5) as client:
            client.post(f"{api.url}/v1/completions", json={"model": MODEL, "prompt": PROMPT, "n": 3, "stream": streamed})

    wait = in_thread(leave)
    ids = claimed_all(engine, 3)
    engine.write(ids[1], end="stop")
    with pytest.raises(httpx.TimeoutException):
        wait()
    until(lambda: [store.get(job_id).status for job_id in ids] == ["cancelled", "completed", "cancelled"])


@pytest.mark.parametrize("streamed", [False, True])
def test_one_that_fails_ends_the_answer_and_the_others(sdk, store, engine, streamed):
    wait = in_thread(lambda: list(sdk.completions.create(model=MODEL, prompt=PROMPT, n=3, stream=streamed)))
    ids = claimed_all(engine, 3)
    engine.write(ids[0], end="stop")
    engine.fail(ids[1], "poison", "three crashes")
    with pytest.raises(openai.APIError, match="three crashes"):
        wait()
    until(lambda: [store.get(job_id).status for job_id in ids] == ["completed", "failed", "cancelled"])


def test_with_a_key_the_whole_group_is_found_again(api, store, engine):
    body, key = {"model": MODEL, "prompt": PROMPT, "n": 2}, {"Idempotency-Key": "again"}
    with httpx.Client(**DIRECT, timeout=0.3) as client, pytest.raises(httpx.TimeoutException):
        client.post(f"{api.url}/v1/completions", json=body, headers=key)
    ids = claimed_all(engine, 2)
    wait = in_thread(lambda: api.client.post("/v1/completions", json=body, headers=key))
    engine.write(ids[0], tokens=2, end="stop")
    engine.write(ids[1], tokens=3, end="length")
    answer = wait()
    assert (answer.json()["id"], answer.headers["Idempotent-Replayed"]) == (ids[0], "true")
    assert [choice["text"] for choice in answer.json()["choices"]] == [text(2), text(3)]
    assert len(api.client.get("/v1/jobs").json()["data"]) == 2
    other = api.client.post("/v1/completions", json={**body, "n": 3}, headers=key)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_conflict")


def test_a_late_reader_gets_every_choice_once(api, engine):
    """One has ended before, two are longer than one read and than what the tailer keeps, of which one goes on."""
    body = {"model": MODEL, "prompt": PROMPT, "n": 3, "max_tokens": 508, "stream": True}
    key = {"Idempotency-Key": "late"}
    with httpx.Client(**DIRECT, timeout=0.3) as client, pytest.raises(httpx.TimeoutException):
        client.post(f"{api.url}/v1/completions", json=body, headers=key)
    ids = claimed_all(engine, 3)
    engine.write(ids[0], tokens=7, end="stop")
    for _ in range(2):
        engine.write(*ids[1:], tokens=253)
    engine.write(ids[1], tokens=2, end="length")
    wait = in_thread(lambda: api.client.post("/v1/completions", json=body, headers=key))
    until(lambda: api.metric("open_streams") == 1)
    time.sleep(0.3)  # polls of the tailer
    engine.write(ids[2], end="stop")
    texts, reasons = defaultdict(str), []
    for event in parse_events(wait().text.split("\n")):
        for choice in event.data.get("choices", []):
            texts[choice["index"]] += choice["text"]
            reasons += [(choice["index"], choice["finish_reason"])] if choice["finish_reason"] else []
    assert texts == {0: text(7), 1: text(508), 2: text(507)}
    assert reasons == [(0, "stop"), (1, "length"), (2, "stop")]


def test_a_queue_without_room_for_all_takes_none(store, model):
    with running_api(store, model, queue_limit=3) as api:
        api.submit()
        answer = api.client.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, "n": 3})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert "3 more" in answer.json()["error"]["message"]
        assert len(api.client.get("/v1/jobs").json()["data"]) == 1


def test_a_submit_whose_reply_was_lost_makes_one_group(model):
    class LosesAReply(MemoryJobStore):
        lost = False

        def submit(self, *jobs, **limits):
            answer = super().submit(*jobs, **limits)
            if not self.lost:
                self.lost = True
                raise StoreUnavailable("the reply was lost")
            return answer

    store = LosesAReply()
    store.bind(store.create("test"))
    with running_api(store, model) as api:
        with httpx.Client(**DIRECT, timeout=0.5) as client, pytest.raises(httpx.TimeoutException):
            client.post(f"{api.url}/v1/completions", json={"model": MODEL, "prompt": PROMPT, "n": 4})
        listed = until(lambda: [job for job in api.client.get("/v1/jobs").json()["data"] if job["status"] == "cancelled"])
        until(lambda: {job["status"] for job in api.client.get("/v1/jobs").json()["data"]} == {"cancelled"})
        assert len(api.client.get("/v1/jobs").json()["data"]) == 4
        assert len({job["group"] for job in listed}) == 1


REFUSED = [
    ({"n": 17}, "n: input should be less than or equal to 16"),
    ({"n": 0}, "n: input should be greater than or equal to 1"),
    ({"best_of": 2}, "best_of: must be equal to n (1)"),
    ({"n": 3, "best_of": 2}, "best_of: must be equal to n (3)"),
]


@pytest.mark.parametrize(("body", "words"), REFUSED, ids=str)
def test_refusals_name_the_field_and_the_limit(refusing_api, body, words):
    answer = refusing_api.client.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(words)


def test_several_prompts_have_n_choices_each(api, sdk, engine, store):
    """In the order of the prompts, and the same ones that each prompt would get by itself."""
    prompts = [PROMPT, [9, 10], PROMPT]
    wait = in_thread(lambda: sdk.completions.create(model=MODEL, prompt=prompts, seed=41, n=2))
    ids = claimed_all(engine, 6)
    records = [store.get(job_id) for job_id in ids]
    assert [list(record.prompt_token_ids) for record in records] == [PROMPT, PROMPT, [9, 10], [9, 10], PROMPT, PROMPT]
    assert [JobSpec.from_json(record.spec).seed for record in records] == [41, 42] * 3
    for i in (3, 0, 5, 1, 4, 2):
        engine.write(ids[i], tokens=i + 1, end="stop", cached_tokens=i)
    answer = wait()
    assert ids == [answer.id, *(f"{answer.id}-{i}" for i in range(1, 6))]
    assert [(choice.index, choice.text) for choice in answer.choices] == [(i, text(i + 1)) for i in range(6)]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 21)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0 + 2 + 4


def test_equal_prompts_without_a_seed_have_different_ones(api, engine, store):
    in_thread(lambda: api.client.post("/v1/completions", json={"model": MODEL, "prompt": ["a", "a"], "max_tokens": 2}))
    ids = claimed_all(engine, 2)
    assert len({JobSpec.from_json(store.get(job_id).spec).seed for job_id in ids}) == 2
    engine.write(*ids, end="stop")


def test_many_prompts_are_streamed_and_their_usage_is_told(sdk, engine):
    options = {"include_usage": True}
    prompts = [f"prompt {i}" for i in range(128)]
    stream = sdk.completions.create(model=MODEL, prompt=prompts, max_tokens=1, stream=True, stream_options=options)
    until(lambda: len(engine.held) == 128 or engine.claim() is None)
    ids = list(engine.held)
    engine.write(*reversed(ids), end="length")
    chunks = list(stream)
    texts = defaultdict(str)
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert dict(texts) == dict.fromkeys(range(128), text(1))
    assert chunks[-1].usage.completion_tokens == 128
    assert chunks[-1].usage.prompt_tokens >= 2 * 128


def test_an_echoed_answer_begins_with_its_prompt(sdk, engine, model):
    """With the text that was sent, or what token ids say; whole and streamed alike."""
    asked = {"model": MODEL, "prompt": ["Once upon", [9, 10]], "echo": True, "max_tokens": 2, "n": 2}
    wait = in_thread(lambda: sdk.completions.create(**asked))
    engine.write(*claimed_all(engine, 4), tokens=2, end="length")
    whole = [choice.text for choice in wait().choices]
    assert whole == [f"Once upon{text(2)}"] * 2 + [model.tokenization.text([9, 10]) + text(2)] * 2
    engine.held.clear()
    stream = sdk.completions.create(**asked, stream=True)
    engine.write(*claimed_all(engine, 4), tokens=2, end="length")
    streamed = defaultdict(str)
    for chunk in stream:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert [streamed[i] for i in range(4)] == whole
