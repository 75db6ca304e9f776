"""Where the time between a kill and the next token went, from the engine's log and the client's clock. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.durability.setup import LogEvent

#: Parts in order. Those of a start have the engine's own names (``phases`` of its event ``registered``).
START = ("imports", "model", "store", "pools", "registration", "page_table")
PARTS = ("detection", *START, "metadata", "pages", "replay", "step")


class NoRecovery(Exception):
    """The log does not tell of a recovery."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds. ``parts`` add up to the first client's next token; the others follow while their pages come in and are replayed."""

    parts: dict[str, float]
    first: float  #: from the kill to the first token that any client saw of the new engine
    median: float
    last: float  #: ... until every client had seen one
    all_pages: float  #: from the last log read until the last job had its pages
    all_replayed: float  #: from then until the last client saw a token: the other jobs' replays share the steps
    pages_restored: int
    tokens_replayed: int

    @property
    def start(self) -> float:
        return sum(self.parts[name] for name in START)


def start_phases(events: Sequence[LogEvent], since: float) -> dict[str, float]:
    """Seconds from the engine's process to its registration, by phase, of the life that began after ``since``."""
    return dict(_registered(events, since).fields["phases"])


def _registered(events: Sequence[LogEvent], since: float) -> LogEvent:
    found = next((e for e in events if e.event == "registered" and e.at > since), None)
    if found is None:
        raise NoRecovery("no engine registered after the kill")
    return found


def recovery(events: Sequence[LogEvent], killed_at: float, arrivals: Sequence[Sequence[float]]) -> Recovery:
    """``arrivals``: of each job's tokens at its client. The old engine's may arrive after its death, the new one's only after
    its registration."""
    registered = _registered(events, killed_at)
    phases: dict[str, float] = registered.fields["phases"]
    taken = [e.at for e in events if e.event == "job_taken" and e.at > registered.at]
    resumed = [e for e in events if e.event == "job_resumed" and e.at > registered.at]
    later = [[at for at in times if at > registered.at] for times in arrivals]
    if len(resumed) < len(arrivals) or not all(later):
        raise NoRecovery(f"{len(resumed)} of {len(arrivals)} jobs were resumed, {sum(map(bool, later))} clients saw a token")
    nexts = sorted(times[0] for times in later)
    gaps = [second - first for times in later for first, second in pairwise(times)]
    computing = nexts[0] - resumed[0].at  # both ends are seen after a step: what is more than a step is replay
    step = min(computing, statistics.median(gaps)) if gaps else computing
    parts = {
        "detection": registered.at - sum(phases.values()) - killed_at,
        **{name: phases[name] for name in START},
        "metadata": max(taken) - registered.at,
        "pages": resumed[0].at - max(taken),
        "replay": computing - step,
        "step": step,
    }
    return Recovery(
        parts=parts,
        first=nexts[0] - killed_at,
        median=statistics.median(nexts) - killed_at,
        last=nexts[-1] - killed_at,
        all_pages=resumed[-1].at - max(taken),
        all_replayed=nexts[-1] - resumed[-1].at,
        pages_restored=sum(e.fields["pages_restored"] for e in resumed),
        tokens_replayed=sum(e.fields["tokens_replayed"] for e in resumed),
    )
