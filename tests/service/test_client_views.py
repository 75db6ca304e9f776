"""What a person sees of a stream."""

import io

from service.client import Event
from service.client_views import StreamView, terminal_safe


class Terminal(io.StringIO):
    def isatty(self):
        return True


def token(text, index=0):
    return Event("token", {"index": index, "token_ids": [1], "text": text})


def show(events, *, out=None, err=None, **how):
    out, err = out or io.StringIO(), err or io.StringIO()
    view = StreamView("job_1", show_text=True, out=out, err=err, **how)
    for event in events:
        view.show(event)
    return view, out.getvalue(), err.getvalue()


DONE = Event("done", {"status": "completed", "finish_reason": "stop", "usage": {"completion_tokens": 2}, "error": None})


def test_a_pipe_gets_the_text_and_nothing_else():
    _, out, err = show([Event("queued", {}), token("Hello"), token(" \x1b[31mworld"), DONE])
    assert out == "Hello \x1b[31mworld"
    assert err == ""


def test_a_terminal_is_not_at_the_models_command():
    _, out, _ = show([token("\x1b]0;evil\x07 text\r\x9b31m"), DONE], out=Terminal(), err=Terminal())
    assert out == "]0;evil text31m\n"
    assert terminal_safe("tab\tnewline\nü") == "tab\tnewline\nü"


def test_progress_goes_to_stderr_when_the_text_goes_elsewhere():
    _, _, err = show([Event("queued", {}), token("a"), token("b"), DONE], err=Terminal(), max_tokens=9)
    assert "queued" in err
    assert "2/9 tokens" in err


def test_interruptions_are_told():
    view, out, err = show(
        [
            token("a"),
            Event("lost", {"reason": "refused", "after": 1}),
            Event("resumed", {"after": 1, "pause": 2.5}),
            Event("recovered", {"count": 1, "tokens_replayed": 7, "pages_restored": 3}),
            token("b"),
            DONE,
        ]
    )
    assert out == "ab"
    assert "connection lost after token 1 (refused); resuming" in err
    assert "resumed after 2.5 s, at token 1" in err
    assert "3 pages restored, 7 tokens replayed" in err
    assert not view.failed


def test_a_failure_is_a_failure():
    failed = Event("failed", {"error": {"code": "deadline_exceeded", "message": "too late"}, "usage": None})
    view, _, err = show([token("a"), failed])
    assert view.failed
    assert "too late (deadline_exceeded)" in err
