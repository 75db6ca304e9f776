"""How an engine does: told to those who listen, true of its books, and nothing that could name a job."""

import json
import threading

import pytest

from service.worker.observer import Totals
from service.worker.vitals import Vitals, run_lengths
from storage.errors import StoreUnavailable
from tests.lives import life, new_store, submit, wait_until
from tests.rigs import request


@pytest.fixture
def told(tiny_folder, tiny_model):
    """(store, one life of an engine, its vitals); they are told every 0.02 s."""
    store = new_store()
    one = life(tiny_folder, tiny_model, store)
    vitals = Vitals(one.rig.engine, Totals(), lambda: one.loop.identity, one.wakeups, interval=0.02)
    stopping = threading.Event()
    thread = threading.Thread(target=vitals.run, args=[store, stopping], daemon=True)
    thread.start()
    yield store, one
    stopping.set()
    thread.join(10)
    assert not thread.is_alive()
    one.crash()


def test_run_lengths():
    assert run_lengths("..oooS") == "2.3oS"
    assert run_lengths("") == ""
    assert run_lengths("." * 12 + "o") == "12.o"


def test_an_idle_engine_and_a_busy_one_answer(told):
    store, one = told
    feed = store.vitals()
    idle = json.loads(feed.wait(20)[0])
    assert (idle["running"], idle["device"], idle["host"]) == (0, "64.", "128.")
    assert idle["incarnation"] == one.loop.identity.incarnation
    submit(store, [request("the-job", 10, max_tokens=200)])
    one.wakeups.hint()
    seen = []

    def letters():
        seen.extend(json.loads(text) for text in feed.wait(20))
        return {letter for each in seen if each["running"] == 1 for letter in each["device"] + each["host"] if not letter.isdigit()}

    wait_until(lambda: letters() >= {".", "o", "S", "B"})
    assert all("the-job" not in json.dumps(each) for each in seen)
    clocks = [each["clock"] for each in seen]
    assert clocks == sorted(clocks)
    feed.close()


def test_books_are_looked_at_by_the_loops_own_thread(told):
    _, one = told
    assert one.wakeups.between_steps(threading.current_thread).result(20) is one.thread


def test_nobody_looks_while_nobody_listens(told):
    store, _ = told
    published, publish = [], store.publish_vitals
    store.publish_vitals = lambda text: published.append(text) or publish(text)
    wait_until(lambda: len(published) > 5)
    assert set(published) == {""}
    feed = store.vitals()
    assert feed.wait(20)
    assert len(published[-1]) > 100
    feed.close()


def test_a_store_that_is_away_and_a_look_that_fails_end_nothing(told):
    store, one = told
    honest = store.publish_vitals
    calls = []

    def away(text):
        calls.append(text)
        raise StoreUnavailable("away")

    store.publish_vitals = away
    wait_until(lambda: len(calls) > 3)
    store.publish_vitals = honest
    feed = store.vitals()
    assert feed.wait(20)
    feed.close()

    def broken():
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        one.wakeups.between_steps(broken).result(20)
    assert one.errors == []
