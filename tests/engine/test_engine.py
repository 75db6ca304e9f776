"""The step loop: batching, chunked prefill, preemption, cancelling, going on. Exactness is `==` on token ids."""

from dataclasses import replace

import pytest

from engine.errors import InvalidRequest, RequestTooLarge
from engine.sampler import SamplingParams
from engine.sequence import Request, restart
from tests.rigs import CHUNK, GREEDY, PAGE_SIZE, make_rig, request


def jobs():
    """Mixed lengths, greedy and seeded."""
    lengths = [3, 40, 16, 17, 5, 33, 64, 9]
    return [request(f"job-{i}", n, seed=i if i % 2 else None, max_tokens=12 + i, order=i) for i, n in enumerate(lengths)]


@pytest.fixture(scope="module")
def alone(tiny_folder, tiny_model):
    """What each job gives when it runs alone."""
    return {job.sequence_id: make_and_run(tiny_folder, tiny_model, [job])[job.sequence_id] for job in jobs()}


def make_and_run(folder, model, requests, **options):
    rig = make_rig(folder, model, **options)
    for job in requests:
        rig.add(job)
    tokens = rig.run()
    assert rig.in_use == options.get("first_page", 0)
    return tokens


def test_a_job_gives_the_same_tokens_in_any_company(tiny_folder, tiny_model, alone):
    assert make_and_run(tiny_folder, tiny_model, jobs()) == alone
    assert make_and_run(tiny_folder, tiny_model, jobs(), max_running=3, first_page=11) == alone


def test_preempted_jobs_are_replayed_to_the_same_tokens(tiny_folder, tiny_model, alone):
    rig = make_rig(tiny_folder, tiny_model, pages=26, min_resident_steps=1)
    for job in jobs():
        rig.add(job)
    assert rig.run() == alone
    assert rig.dropped, "the pool was large enough for all: nothing was tested"
    assert rig.in_use == 0


def test_going_on_from_any_token_gives_the_rest(tiny_folder, tiny_model, alone):
    job = jobs()[3]
    whole = alone[job.sequence_id]
    for done in range(1, len(whole)):
        resumed = replace(job, generated_ids=tuple(whole[:done]))
        assert make_and_run(tiny_folder, tiny_model, [resumed])[job.sequence_id] == whole


def test_text_is_the_same_however_often_it_is_interrupted(tiny_folder, tiny_model):
    job = request("text", 12, seed=3, max_tokens=40)
    rig = make_rig(tiny_folder, tiny_model)
    rig.add(job)
    tokens = rig.run()["text"]
    for done in (1, 7, 23, 39):
        resumed = replace(job, generated_ids=tuple(tokens[:done]))
        again = make_rig(tiny_folder, tiny_model)
        seen = again.add(resumed)
        again.run()
        assert seen + again.text("text") == rig.text("text")


def test_a_higher_priority_goes_first_and_is_not_preempted(tiny_folder, tiny_model):
    rig = make_rig(tiny_folder, tiny_model, max_running=1)
    rig.add(request("late", order=1))
    rig.add(request("urgent", order=2, priority=5))
    rig.run()
    order = [output.sequence_id for output in rig.outputs]
    assert order[: order.index("late")] == ["urgent"] * 20


def test_a_suspect_takes_its_next_step_alone(tiny_folder, tiny_model):
    rig = make_rig(tiny_folder, tiny_model)
    rig.add(request("good", order=0))
    rig.step()
    rig.add(request("suspect", order=1, alone=True))
    for _ in range(3):
        result = rig.step()
        assert {o.sequence_id for o in result.outputs} == {"suspect"}
    rig.engine.clear_suspicion("suspect")
    assert {o.sequence_id for o in rig.step().outputs} == {"good", "suspect"}
    rig.run()


def test_a_suspect_goes_before_those_that_leave_it_no_room(tiny_folder, tiny_model):
    """Waiting behind them it would be blamed for their crashes, and fail as poison without having run."""
    rig = make_rig(tiny_folder, tiny_model, max_running=1)
    rig.add(request("urgent", order=0, priority=5))
    rig.add(request("later suspect", order=3, alone=True))
    rig.add(request("suspect", order=2, alone=True))
    assert {o.sequence_id for _ in range(3) for o in rig.step().outputs} == {"suspect"}


def test_what_returns_has_its_first_token_before_what_is_back_has_another(tiny_folder, tiny_model, alone):
    """Steps of jobs that are back would take the processors from those whose pages and tails are still missing."""
    rig = make_rig(tiny_folder, tiny_model)
    back, late, new = jobs()[2], jobs()[6], jobs()[0]
    for job in (back, late):
        rig.add(replace(job, max_tokens=2))  # leaves its prompt's full pages in the prefix cache
    rig.run()

    def return_again(job, done):
        rig.add(replace(job, generated_ids=tuple(alone[job.sequence_id][:done])))

    def step():
        return [output.sequence_id for output in rig.step().outputs]

    rig.add(new)
    return_again(back, 3)
    assert step() == [back.sequence_id]
    assert set(step()) == {back.sequence_id, new.sequence_id}
    return_again(late, PAGE_SIZE + 1)  # the copy of a full page was lost with the engine
    assert step() == [late.sequence_id]
    assert set(step()) == {job.sequence_id for job in (back, late, new)}


def test_but_none_waits_for_what_has_to_be_computed_anew(tiny_folder, tiny_model, alone):
    rig = make_rig(tiny_folder, tiny_model)
    first, second = jobs()[0], jobs()[6]
    rig.add(first)
    rig.step()
    rig.add(replace(second, generated_ids=tuple(alone[second.sequence_id][:3])))
    assert [output.sequence_id for output in rig.step().outputs] == [first.sequence_id]


def test_abort_gives_every_page_back_at_once(tiny_folder, tiny_model, alone):
    rig = make_rig(tiny_folder, tiny_model)
    for job in jobs():
        rig.add(job)
    for step in range(30):
        rig.step()
        if step % 4 == 0 and rig.engine.sequence_ids:
            victim = rig.engine.sequence_ids[step % len(rig.engine.sequence_ids)]
            assert rig.engine.abort(victim)
            assert not rig.engine.abort(victim)
            rig.engine.check()
            assert rig.tokens[victim] == alone[victim][: len(rig.tokens[victim])]
    rig.run()
    assert rig.in_use == 0


def test_what_cannot_run_is_refused_in_words(tiny_folder, tiny_model):
    rig = make_rig(tiny_folder, tiny_model, pages=8)
    with pytest.raises(InvalidRequest, match="empty"):
        rig.engine.add(Request("a", (), GREEDY, 5))
    with pytest.raises(RequestTooLarge, match="--device-pages"):
        rig.engine.add(request("b", 30, max_tokens=20))
    with pytest.raises(RequestTooLarge, match="context"):
        rig.engine.add(request("c", 30, max_tokens=10_000))
    rig.add(request("d", 5))
    with pytest.raises(InvalidRequest, match="already"):
        rig.engine.add(request("d", 5))
    with pytest.raises(InvalidRequest, match="nothing is left"):
        rig.engine.add(request("e", 5, max_tokens=2, generated_ids=(1, 2)))
    rig.run()


def test_it_stops_where_it_is_told_to(tiny_folder, tiny_model):
    rig = make_rig(tiny_folder, tiny_model)
    free = Request("free", (20, 30, 40), SamplingParams(temperature=1.0, seed=5), 60, ignore_eos=True)
    rig.add(free)
    rig.run()
    text = rig.text("free")
    stop = text[10:13]
    stopped = make_rig(tiny_folder, tiny_model)
    stopped.add(Request("s", free.prompt_ids, free.sampling, 60, stop=(stop,), ignore_eos=True))
    stopped.run()
    assert stopped.text("s") == text[: text.index(stop)]
    assert stopped.outputs[-1].finish == "stop"
    assert stopped.tokens["s"] == rig.tokens["free"][: len(stopped.tokens["s"])]


@pytest.mark.parametrize("generated", [0, 1, 2, 5, 20])
def test_the_arithmetic_of_going_on(generated):
    num_prompt = 21
    next_row = num_prompt + generated - 1  # the row that yields the next token
    for restored in range((num_prompt + generated) // PAGE_SIZE + 1):
        begin = restart(num_prompt, generated, restored, page_size=PAGE_SIZE, prefill_chunk=CHUNK)
        rows = restored * PAGE_SIZE
        if rows >= num_prompt and generated:
            assert begin.num_stored == min(rows, next_row)
            assert begin.replayed == next_row - begin.num_stored
        else:  # the prompt chunk that the first missing row belongs to is recomputed from its first row
            assert begin.num_stored == rows
            assert begin.replayed == next_row - min(rows, num_prompt - 1) // CHUNK * CHUNK
    assert begin.replayed < PAGE_SIZE or not generated or rows < num_prompt
