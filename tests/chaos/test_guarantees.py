"""Each checker finds what is planted, and nothing in a good run. A checker that finds nothing proves nothing."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from chaos.dump import Dump, EngineGauges, LogRow, StoredJob
from chaos.guarantees import Run, check, check_undisturbed
from chaos.history import Call, Event, FaultRecord, History, JobSeen, Record, StreamClosed, StreamOpened
from chaos.workload import Answer
from storage import chain
from storage.findings import Check, Finding, Severity

JOB, CASE = "job_1", "greedy"
TOKENS, TEXTS = (11, 12, 13, 14), ("a", "b", "", "cd")
RIGHT = Answer("completed", TOKENS, "abcd", "length")
FINAL = JobSeen("completed", TOKENS, "abcd", "length")
IDLE = EngineGauges(0.0, 0.0, 0.0)


def stored(tokens: tuple[int, ...] = TOKENS) -> StoredJob:
    rows = tuple(LogRow(f"{at}-0", token, text) for at, (token, text) in enumerate(zip(tokens, TEXTS, strict=False), 1))
    digest = chain.extend_all(chain.start("{}", (1, 2), JOB), tokens)
    return StoredJob(JOB, "completed", len(rows), digest, "{}", (1, 2), 1, rows)


def token(at: int, attempt: int = 1) -> Event:
    return Event("c0", JOB, attempt, 10.0 + at, "token", at + 1, at, (TOKENS[at],), TEXTS[at])


def call(operation: str, started: float, seen: JobSeen | None, status: int | None = 200, key: str = "") -> Call:
    return Call("c0", operation, started, started + 0.5, status, JOB if seen else "", CASE if key else "", key, seen)


def good_history() -> list[Record]:
    """Submitted, streamed over two connections with a break between, looked at in the middle and at the end."""
    return [
        call("submit", 0.0, None, None, key="k1"),
        call("submit", 1.0, JobSeen("queued"), 202, key="k1"),
        StreamOpened("c0", JOB, 1, 2.0, None, 200),
        Event("c0", JOB, 1, 2.5, "in_progress"),
        token(0),
        token(1),
        StreamClosed("c0", JOB, 1, 12.0, "broken", "reset"),
        call("get", 12.1, JobSeen("in_progress", TOKENS[:2], "ab")),
        StreamOpened("c0", JOB, 2, 12.5, 2, 200),
        Event("c0", JOB, 2, 12.6, "recovered"),
        token(2, 2),
        token(3, 2),
        Event("c0", JOB, 2, 15.0, "done", 5),
        StreamClosed("c0", JOB, 2, 15.1, "terminal"),
        call("get", 16.0, FINAL),
        FaultRecord("bit flip in host page 3", 13.0, 13.1, True, "bit 7", ("host page 3",)),
    ]


def _bad_page(page: int) -> Finding:
    return Finding(Severity.REPAIRABLE, Check.PAGE, f"host page {page}", "its bytes do not have the checksum of its entry")


def run_of(records: list[Record], **changes: object) -> Run:
    dump = Dump(
        jobs={JOB: FINAL},
        stored={JOB: stored()},
        idle={"engine": (IDLE, IDLE)},
        pool_files={"engine": ("pool.safetensors",)},
        counters={},
        verified={"after its end": (Finding(Severity.NOTE, Check.FILE, "notes.txt", "is not a file of ours"), _bad_page(3))},
    )
    return Run(History.of(records), replace(dump, **changes), {JOB: CASE}, {CASE: RIGHT})


def swapped(index: int, *records: Record) -> list[Record]:
    """The good history with the record at ``index`` replaced."""
    history = good_history()
    return [*history[:index], *records, *history[index + 1 :]]


def test_a_good_run_has_no_violation():
    assert check(run_of(good_history())) == []


_OTHER = (11, 12, 99, 14)
_FINAL_CANCELLED = replace(FINAL, status="cancelled")
_HALF = replace(stored(), rows=stored().rows[:2])


def _rows(*ids: str) -> StoredJob:
    return replace(stored(), rows=tuple(replace(row, entry_id=entry) for row, entry in zip(stored().rows, ids, strict=True)))


PLANTED: dict[str, tuple[str, str, Callable[[], Run]]] = {
    "a hole in the log": ("I1", "positions", lambda: run_of(good_history(), stored={JOB: _rows("1-0", "2-0", "4-0", "5-0")})),
    "a position twice": ("I1", "positions", lambda: run_of(good_history(), stored={JOB: _rows("1-0", "2-0", "2-0", "3-0")})),
    "a record that counts more": ("I1", "counts", lambda: run_of(good_history(), stored={JOB: replace(stored(), length=5)})),
    "a flipped token in the log": (
        "I1",
        "chain",
        lambda: run_of(good_history(), stored={JOB: replace(stored(_OTHER), chain=stored().chain)}),
    ),
    "a repeated token": ("I2", "repeated", lambda: run_of(swapped(10, token(1, 2), token(2, 2)))),
    "a lost token": ("I2", "lost", lambda: run_of(swapped(10))),
    "an id that does not rise": ("I2", "id 2", lambda: run_of(swapped(10, replace(token(2, 2), id=2)))),
    "another token than in the log": ("I2", "not a prefix", lambda: run_of(swapped(10, replace(token(2, 2), token_ids=(99,))))),
    "another text than in the log": ("I2", "other text", lambda: run_of(swapped(11, replace(token(3, 2), text="xx")))),
    "an end that comes early": (
        "I2",
        "told the end at 3",
        lambda: run_of([*swapped(11)[:11], Event("c0", JOB, 2, 15.0, "done", 4)]),
    ),
    "an end with a wrong id": ("I2", "terminal event with id 4", lambda: run_of(swapped(12, Event("c0", JOB, 2, 15.0, "done", 4)))),
    "an event after the end": (
        "I2",
        "after the terminal",
        lambda: run_of(swapped(13, Event("c0", JOB, 2, 15.1, "in_progress"), StreamClosed("c0", JOB, 2, 15.2, "terminal"))),
    ),
    "other tokens than the reference": (
        "I3",
        "other tokens",
        lambda: replace(run_of(good_history()), answers={CASE: replace(RIGHT, token_ids=_OTHER)}),
    ),
    "other text than the reference": (
        "I3",
        "other text or ending",
        lambda: replace(run_of(good_history()), answers={CASE: replace(RIGHT, finish_reason="stop")}),
    ),
    "a cancelled job with other tokens": (
        "I3",
        "cancelled",
        lambda: run_of(good_history(), jobs={JOB: replace(_FINAL_CANCELLED, token_ids=(11, 98))}),
    ),
    "a status unlike the reference": (
        "I3",
        "ended incomplete",
        lambda: run_of(good_history(), jobs={JOB: replace(FINAL, status="incomplete")}),
    ),
    "a token that was shown and is gone": ("I4", "does not have", lambda: run_of(good_history(), stored={JOB: _HALF})),
    "a job that was shown and is gone": ("I4", "not in the store", lambda: run_of(good_history(), stored={})),
    "fewer tokens than before": (
        "I4",
        "fewer tokens",
        lambda: run_of([*good_history()[:8], call("get", 13.0, JobSeen("in_progress", TOKENS[:1], "a")), *good_history()[8:]]),
    ),
    "a leaked page": (
        "I6",
        "uses 0.250",
        lambda: run_of(good_history(), idle={"engine": (IDLE, replace(IDLE, kv_cache_usage=0.25))}),
    ),
    "a job held for ever": ("I6", "running", lambda: run_of(good_history(), idle={"engine": (IDLE, replace(IDLE, running=1.0))})),
    "a second pool file": (
        "I6",
        "pool files",
        lambda: run_of(good_history(), pool_files={"engine": ("pool.safetensors", "pool.tmp")}),
    ),
    "a job that does not end": (
        "I8",
        "still in_progress",
        lambda: run_of(good_history(), jobs={JOB: replace(FINAL, status="in_progress")}),
    ),
    "an accepted job that is unknown": ("I8", "unknown", lambda: run_of(good_history(), jobs={})),
    "a healthy job that failed": ("I8", "failed", lambda: run_of(good_history(), jobs={JOB: replace(FINAL, status="failed")})),
    "a submission without an answer": (
        "I8",
        "never got",
        lambda: run_of([*good_history(), call("submit", 20.0, None, None, key="k2")]),
    ),
    "a submission refused": (
        "I8",
        "refused with 500",
        lambda: run_of([*good_history(), call("submit", 20.0, None, 500, key="k2")]),
    ),
    "one key, two jobs": (
        "I8",
        "made 2 jobs",
        lambda: run_of([*good_history(), replace(call("submit", 1.6, JobSeen("queued"), 202, key="k1"), job_id="job_2")]),
    ),
    "a job from nowhere": (
        "I8",
        "no client was told of",
        lambda: run_of(good_history(), stored={JOB: stored(), "job_9": replace(stored(), job_id="job_9", rows=(), length=0)}),
    ),
    "a reader that gave up": ("I8", "gave up", lambda: run_of([*good_history(), StreamClosed("c1", JOB, 3, 90.0, "gave_up")])),
    "a terminal status that changed": (
        "I10",
        "completed was followed by in_progress",
        lambda: run_of([*good_history(), call("get", 20.0, JobSeen("in_progress", TOKENS, "abcd"))]),
    ),
    "a terminal job that changed": (
        "I10",
        "changed",
        lambda: run_of([*good_history(), call("get", 20.0, replace(FINAL, finish_reason="stop"))]),
    ),
    "an ending unlike the status": (
        "I10",
        "was told 'failed'",
        lambda: run_of(swapped(12, Event("c0", JOB, 2, 15.0, "failed", 5))),
    ),
    "a cancel that did not cancel": (
        "I10",
        "cancel was answered with a job that is in_progress",
        lambda: run_of([*good_history(), call("cancel", 11.0, JobSeen("in_progress", TOKENS[:2], "ab"))]),
    ),
    "damage": (
        "I11",
        "after: a hole",
        lambda: run_of(good_history(), verified={"after": (Finding(Severity.DAMAGE, Check.LOG, JOB, "a hole"),)}),
    ),
    "a bad page that no fault made": ("I11", "checksum", lambda: run_of(good_history(), verified={"after": (_bad_page(13),)})),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_found(name: str):
    guarantee, words, make = PLANTED[name]
    found = check(make())
    assert any(violation.guarantee == guarantee and words in violation.what for violation in found), [str(v) for v in found]


def test_a_move_back_to_the_queue_is_legal_and_overlapping_looks_say_nothing_about_order():
    back = call("get", 12.7, JobSeen("queued", TOKENS[:2], "ab"))
    again = call("get", 13.5, JobSeen("in_progress", TOKENS[:2], "ab"))
    overlapping = replace(call("get", 16.2, JobSeen("in_progress", TOKENS, "abcd")), ended=16.6)
    assert check(run_of([*good_history()[:8], back, again, *good_history()[8:]])) == []
    assert check(run_of([*good_history(), overlapping])) == []


@pytest.mark.parametrize(
    "record",
    [
        StreamClosed("c0", JOB, 1, 3.0, "broken", "reset"),
        StreamClosed("c0", JOB, 1, 3.0, "silent"),
        StreamOpened("c0", JOB, 1, 3.0, 2, None),
        StreamOpened("c0", JOB, 1, 3.0, 2, 503),
        call("get", 3.0, None, 503),
        call("get", 3.0, None, None),
    ],
)
def test_a_disturbed_client_is_found(record: Record):
    calm = [
        r
        for r in good_history()
        if not (isinstance(r, StreamClosed) and r.how == "broken") and not (isinstance(r, Call) and r.status is None)
    ]
    assert check_undisturbed(run_of(calm)) == []
    assert len(check_undisturbed(run_of([*calm, record]))) == 1
