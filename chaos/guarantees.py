"""What the product promises, as pure functions over a history and a dump. Each answers with every violation it finds, in words.

Numbers are those of the design: I1 the log is whole, I2 streams are exactly once, I3 equal to the uninterrupted run, I4 nothing
seen is missing, I6 no page leaks, I8 every accepted job ends, I10 statuses move legally, I11 no damage. Nothing here reads a clock
or a socket.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from chaos.dump import Dump
from chaos.history import TERMINAL_EVENTS, Call, Event, FaultRecord, History, StreamClosed, StreamOpened
from chaos.workload import Answer
from storage import chain as chains
from storage.findings import Check, Severity
from storage.records import TRANSITIONS, JobStatus

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Violation:
    guarantee: str
    job_id: str
    what: str
    evidence: str = ""

    def __str__(self) -> str:
        return f"{self.guarantee} {self.job_id or '-'}: {self.what}" + (f" [{self.evidence}]" if self.evidence else "")


@dataclass(frozen=True, slots=True)
class Run:
    """All that a run left behind."""

    history: History
    dump: Dump
    cases: dict[str, str]  #: job id -> name of its case
    answers: dict[str, Answer]  #: case -> what an uninterrupted run made of it

    def is_to_fail(self, job_id: str) -> bool:
        """A poison prompt: failing is its right answer."""
        return job_id in self.cases and self.answers[self.cases[job_id]].status == JobStatus.FAILED


Checker = Callable[[Run], list[Violation]]


def is_prefix(shorter: Sequence[object], longer: Sequence[object]) -> bool:
    return len(shorter) <= len(longer) and all(a == b for a, b in zip(shorter, longer, strict=False))


def _difference(seen: Sequence[int], right: Sequence[int]) -> str:
    for at, (a, b) in enumerate(zip(seen, right, strict=False)):
        if a != b:
            return f"token {at} is {a}, should be {b}"
    return f"{len(seen)} tokens, should be {len(right)}"


# --- I1 ----------------------------------------------------------------------------------------------------------------


def check_logs(run: Run) -> list[Violation]:
    """I1: positions 1..n once each and in order; the record's length and chain hash are those of the log."""
    found = []
    for job in run.dump.stored.values():
        ids = [row.entry_id for row in job.rows]
        if ids != [f"{at}-0" for at in range(1, len(ids) + 1)]:
            found.append(Violation("I1", job.job_id, "log positions are not 1..n once each", f"{ids[:3]} … {ids[-3:]}"))
        if job.length != len(job.rows):
            found.append(Violation("I1", job.job_id, f"record counts {job.length} tokens, log has {len(job.rows)}"))
        chain = chains.extend_all(chains.start(job.spec, job.prompt_token_ids, job.job_id), job.tokens)
        if job.rows and chain != job.chain:
            found.append(Violation("I1", job.job_id, "chain hash of the record is not that of the log", f"{job.chain} {chain}"))
    return found


# --- I2 ----------------------------------------------------------------------------------------------------------------


def check_streams(run: Run) -> list[Violation]:
    """I2: what a reader got over all its connections is each token once, in order, from its cursor on; text and ending fit."""
    events: dict[tuple[str, str], list[Event]] = defaultdict(list)
    starts: dict[tuple[str, str], int] = {}
    for record in run.history:
        if isinstance(record, StreamOpened) and record.attempt == 1:
            starts[record.reader, record.job_id] = record.cursor or 0
        elif isinstance(record, Event):
            events[record.reader, record.job_id].append(record)
    found = []
    for (reader, job_id), of_reader in events.items():
        found += _check_reader(run, reader, job_id, starts.get((reader, job_id), 0), of_reader)
    return found


def _check_reader(run: Run, reader: str, job_id: str, start: int, events: Sequence[Event]) -> list[Violation]:
    found = []
    seen: list[int] = []
    text = ""
    ended: Event | None = None
    for event in events:
        position = start + len(seen)
        if ended is not None:
            found.append(Violation("I2", job_id, f"{reader} got {event.name!r} after the terminal event", str(event)))
        if event.name == "token":
            if event.index != position or event.id != position + len(event.token_ids):
                what = "repeated" if event.index is not None and event.index < position else "lost"
                problem = f"{reader} is at {position} and got index {event.index}, id {event.id}: tokens {what}"
                found.append(Violation("I2", job_id, problem, str(event)))
                return found
            seen += event.token_ids
            text += event.text
        elif event.name in TERMINAL_EVENTS:
            ended = event
            if event.id != position + 1:
                found.append(Violation("I2", job_id, f"{reader} got a terminal event with id {event.id} at {position}", str(event)))
        elif event.id is not None:
            found.append(Violation("I2", job_id, f"{reader} got {event.name!r} with an id", str(event)))
    stored = run.dump.stored.get(job_id)
    if stored is None:
        return [*found, Violation("I4", job_id, f"{reader} saw {len(seen)} tokens of a job that is not in the store")]
    if not is_prefix(seen, stored.tokens[start:]):
        evidence = _difference(seen, stored.tokens[start:])
        found.append(Violation("I2", job_id, f"{reader} saw tokens that are not a prefix of the log from {start}", evidence))
    elif ended is not None and start + len(seen) != len(stored.rows):
        problem = f"{reader} was told the end at {start + len(seen)}, the log has {len(stored.rows)} tokens"
        found.append(Violation("I2", job_id, problem))
    expected_text = "".join(row.text for row in stored.rows[start : start + len(seen)])
    if text != expected_text:
        found.append(
            Violation("I2", job_id, f"{reader} saw other text than the log has", f"{text[-40:]!r} {expected_text[-40:]!r}")
        )
    return found


def check_undisturbed(run: Run) -> list[Violation]:
    """I2, where only an engine died: a client with an open stream sees a pause, never an error and never a refused call."""
    found = []
    for record in run.history:
        if isinstance(record, StreamClosed) and record.how != "terminal":
            found.append(Violation("I2", record.job_id, f"{record.reader}'s stream was disturbed: {record.how}", record.error))
        elif isinstance(record, StreamOpened) and record.status not in (200, 204):
            found.append(Violation("I2", record.job_id, f"{record.reader}'s stream was answered {record.status}"))
        elif isinstance(record, Call) and (record.status is None or record.status >= 400):
            found.append(Violation("I2", record.job_id, f"{record.operation} by {record.client}: {record.status}", record.error))
    return found


# --- I3 ----------------------------------------------------------------------------------------------------------------


def check_reference(run: Run) -> list[Violation]:
    """I3: a finished job has exactly the tokens, text and ending of the uninterrupted run; a cancelled one a prefix of them."""
    found = []
    for job_id, case in run.cases.items():
        job, right = run.dump.jobs.get(job_id), run.answers[case]
        if job is None:
            continue  # I8's business
        if job.status == JobStatus.CANCELLED:
            if not is_prefix(job.token_ids, right.token_ids):
                evidence = _difference(job.token_ids, right.token_ids)
                found.append(Violation("I3", job_id, f"cancelled {case} has other tokens than its reference", evidence))
        elif job.status == right.status:
            if job.token_ids != right.token_ids:
                evidence = _difference(job.token_ids, right.token_ids)
                found.append(Violation("I3", job_id, f"{case} has other tokens than its reference", evidence))
            elif (job.text, job.finish_reason) != (right.text, right.finish_reason):
                found.append(Violation("I3", job_id, f"{case} has other text or ending than its reference", job.finish_reason))
        else:
            found.append(Violation("I3", job_id, f"{case} ended {job.status}, its reference {right.status}", job.error))
    return found


# --- I4 ----------------------------------------------------------------------------------------------------------------


def check_nothing_forgotten(run: Run) -> list[Violation]:
    """I4: what any answer ever showed is still there, unchanged; later answers never show less than earlier ones."""
    found = []
    for job_id, calls in _seen_by_job(run.history).items():
        stored = run.dump.stored.get(job_id)
        if stored is None:
            found.append(Violation("I4", job_id, "the api showed a job that is not in the store"))
            continue
        for call in calls:
            assert call.seen is not None
            if not is_prefix(call.seen.token_ids, stored.tokens):
                evidence = _difference(call.seen.token_ids, stored.tokens)
                found.append(Violation("I4", job_id, f"{call.operation} showed tokens that the log does not have", evidence))
        for earlier, later in _in_order([call for call in calls if call.operation == "get"]):
            if earlier.seen and later.seen and len(later.seen.token_ids) < len(earlier.seen.token_ids):
                found.append(Violation("I4", job_id, "a later answer showed fewer tokens than an earlier one"))
        job = run.dump.jobs.get(job_id)
        if job is not None and job.token_ids != stored.tokens:
            found.append(
                Violation("I4", job_id, "the api shows other tokens than the log has", _difference(job.token_ids, stored.tokens))
            )
    return found


# --- I6 ----------------------------------------------------------------------------------------------------------------


def check_pages(run: Run) -> list[Violation]:
    """I6: idle engines use as many pages as when they started; a data directory holds one pool file and nothing like it."""
    found = []
    for engine, (start, end) in run.dump.idle.items():
        if end.kv_cache_usage != start.kv_cache_usage:
            problem = f"{engine} is idle and uses {end.kv_cache_usage:.3f} of its pages, {start.kv_cache_usage:.3f} at its start"
            found.append(Violation("I6", "", problem))
        if (end.running, end.waiting) != (0.0, 0.0):
            problem = f"{engine} holds {end.running:g} running and {end.waiting:g} waiting jobs after the last ended"
            found.append(Violation("I6", "", problem))
    for engine, names in run.dump.pool_files.items():
        if names != ("pool.safetensors",):
            found.append(Violation("I6", "", f"{engine} has other pool files than one", ", ".join(names)))
    return found


# --- I8 ----------------------------------------------------------------------------------------------------------------


def check_all_ended(run: Run) -> list[Violation]:
    """I8: every accepted job is there and terminal, and none failed; every submission got an answer; no job came from nowhere."""
    found = []
    by_key: dict[str, set[str]] = defaultdict(set)
    answered: set[str] = set()
    for call in run.history.all(Call):
        if call.operation != "submit":
            continue
        if call.status in (200, 202):
            by_key[call.key].add(call.job_id)
        if call.status is not None and call.status not in (429, 503):
            answered.add(call.key)
            if call.status >= 400:
                found.append(Violation("I8", "", f"submission of {call.case} was refused with {call.status}", call.error))
    submitted = {call.key for call in run.history.all(Call) if call.operation == "submit"}
    found += [Violation("I8", "", f"submission {key} never got an answer") for key in sorted(submitted - answered)]
    found += [
        Violation("I8", "", f"one Idempotency-Key made {len(ids)} jobs", " ".join(sorted(ids)))
        for ids in by_key.values()
        if len(ids) > 1
    ]
    accepted = {job_id for ids in by_key.values() for job_id in ids}
    found += [
        Violation("I8", job_id, "a job is in the store that no client was told of")
        for job_id in sorted(run.dump.stored.keys() - accepted)
    ]
    for job_id in sorted(accepted):
        job = run.dump.jobs.get(job_id)
        if job is None:
            found.append(Violation("I8", job_id, "an accepted job is unknown to the api"))
        elif not JobStatus(job.status).terminal:
            found.append(Violation("I8", job_id, f"still {job.status} at the end, with {len(job.token_ids)} tokens"))
        elif job.status == JobStatus.FAILED and not run.is_to_fail(job_id):
            found.append(Violation("I8", job_id, "a healthy job failed", job.error))
    gave_up = [closed for closed in run.history.all(StreamClosed) if closed.how == "gave_up"]
    found += [Violation("I8", closed.job_id, f"{closed.reader} gave up waiting for news") for closed in gave_up]
    return found


# --- I10 ---------------------------------------------------------------------------------------------------------------

#: What one observation may be followed by: any number of moves may lie between two looks.
_REACHABLE: dict[JobStatus, frozenset[JobStatus]] = {}


def _reachable(status: JobStatus) -> frozenset[JobStatus]:
    if status not in _REACHABLE:
        reached, todo = {status}, [status]
        while todo:
            for following in TRANSITIONS[todo.pop()] - reached:
                reached.add(following)
                todo.append(following)
        _REACHABLE[status] = frozenset(reached)
    return _REACHABLE[status]


def check_statuses(run: Run) -> list[Violation]:
    """I10: a later look never shows what the earlier status cannot lead to; what is terminal never changes in any way."""
    found = []
    for job_id, calls in _seen_by_job(run.history).items():
        for earlier, later in _in_order(calls):
            assert earlier.seen is not None
            assert later.seen is not None
            before, after = JobStatus(earlier.seen.status), JobStatus(later.seen.status)
            if after not in _reachable(before):
                found.append(
                    Violation("I10", job_id, f"{before} was followed by {after}", f"{earlier.operation}, {later.operation}")
                )
        for earlier, later in _in_order([call for call in calls if call.operation == "get"]):
            if earlier.seen and JobStatus(earlier.seen.status).terminal and earlier.seen != later.seen:
                found.append(Violation("I10", job_id, "a terminal job changed", f"{earlier.seen} {later.seen}"))
        last = run.dump.jobs.get(job_id)
        final = next((call.seen for call in reversed(calls) if call.seen and JobStatus(call.seen.status).terminal), None)
        if last is not None and final is not None and last.status != final.status:
            found.append(Violation("I10", job_id, f"was {final.status} and is {last.status} at the end"))
    return found + _check_endings(run) + _check_cancels(run)


def _check_endings(run: Run) -> list[Violation]:
    words = {"completed": "done", "incomplete": "done", "failed": "failed", "cancelled": "cancelled"}
    found = []
    for event in run.history.all(Event):
        job = run.dump.jobs.get(event.job_id)
        if event.name in TERMINAL_EVENTS and job is not None and words.get(job.status) != event.name:
            found.append(Violation("I10", event.job_id, f"{event.reader} was told {event.name!r}, the job is {job.status}"))
    return found


def _check_cancels(run: Run) -> list[Violation]:
    """A cancel that was answered with 200 ends the job there and then."""
    found = []
    for call in run.history.all(Call):
        if call.operation == "cancel" and call.status == 200 and call.seen is not None:
            job = run.dump.jobs.get(call.job_id)
            if not JobStatus(call.seen.status).terminal:
                found.append(Violation("I10", call.job_id, f"cancel was answered with a job that is {call.seen.status}"))
            elif job is not None and job.status != call.seen.status:
                found.append(Violation("I10", call.job_id, f"cancel was answered {call.seen.status}, the job is {job.status}"))
    return found


# --- I11 ---------------------------------------------------------------------------------------------------------------


def check_verified(run: Run) -> list[Violation]:
    """I11: ``midsentence verify`` finds no damage, and no bad page but those that a fault spoilt."""
    spoilt = {page for fault in run.history.all(FaultRecord) for page in fault.spoils}
    return [
        Violation("I11", "", f"verify {when}: {finding.what}", str(finding))
        for when, findings in run.dump.verified.items()
        for finding in findings
        if finding.severity is Severity.DAMAGE or (finding.check is Check.PAGE and not spoilt & {"*", finding.where})
    ]


# --- together ----------------------------------------------------------------------------------------------------------

ALWAYS: tuple[Checker, ...] = (
    check_logs,
    check_streams,
    check_reference,
    check_nothing_forgotten,
    check_pages,
    check_all_ended,
    check_statuses,
    check_verified,
)


def check(run: Run, more: Iterable[Checker] = ()) -> list[Violation]:
    return [violation for checker in (*ALWAYS, *more) for violation in checker(run)]


def _seen_by_job(history: History) -> dict[str, list[Call]]:
    """Calls that showed a job, by job, in the order in which they were answered."""
    found: dict[str, list[Call]] = defaultdict(list)
    for call in history.all(Call):
        if call.seen is not None:
            found[call.job_id].append(call)
    return {job_id: sorted(calls, key=lambda call: call.ended) for job_id, calls in found.items()}


def _in_order(calls: Sequence[Call]) -> list[tuple[Call, Call]]:
    """Pairs of which the later was begun after the earlier had ended: only those say anything about order."""
    return [(earlier, later) for earlier, later in pairwise(calls) if earlier.ended <= later.started]
