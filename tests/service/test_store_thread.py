"""The store's thread, turn by turn, without being a thread: what is sent when, and what reaches the caller."""

import pytest

from service.errors import RegistrationRefused
from service.worker.store_thread import StoreThread
from storage.errors import StoreUnavailable


class Turns:
    def __init__(self):
        self.now, self.sent = 0.0, []
        self.answers = {}
        self.thread = StoreThread(
            self, lambda store: store.call("beat"), on_wake=lambda: None, on_death=lambda error: None, clock=lambda: self.now
        )

    def call(self, name):
        self.sent.append(name)
        answers = self.answers.get(name, [])
        answer = answers.pop(0) if answers else "answered"
        if isinstance(answer, Exception):
            raise answer
        return answer

    def submit(self, name):
        return self.thread.submit(lambda store: store.call(name))


def test_a_call_that_was_not_answered_is_sent_again_before_anything_else():
    turns = Turns()
    turns.answers = {"first": [StoreUnavailable("lost")] * 3}
    first, second = turns.submit("first"), turns.submit("second")
    turns.thread.turn()
    pauses = []
    for _ in range(3):
        pauses.append(turns.thread.turn())
        turns.thread.turn()  # too early: nothing is sent
        turns.now += pauses[-1] + 1e-9
    assert pauses == [0.05, 0.1, 0.2]
    assert (turns.thread.turn(), first.result()) == (0.0, "answered")
    turns.thread.turn()
    assert second.result() == "answered"
    assert turns.sent == ["beat", "first", "first", "first", "first", "second"]
    assert turns.thread.away_since is None


def test_a_beat_that_is_due_goes_before_what_is_queued():
    turns = Turns()
    turns.thread.turn()
    turns.now = 1.0
    turns.submit("call")
    turns.thread.turn()
    turns.thread.turn()
    assert turns.sent == ["beat", "beat", "call"]


def test_a_refused_registration_reaches_whoever_asked():
    """It once ended the thread, and with it the process: exit 1 and a new start, for ever, in place of exit 78 and the reason."""
    turns = Turns()
    turns.answers = {"register": [RegistrationRefused("a copy of one in use")]}
    registered, later = turns.submit("register"), turns.submit("later")
    for _ in range(3):
        turns.thread.turn()
    with pytest.raises(RegistrationRefused):
        registered.result()
    assert later.result() == "answered"
