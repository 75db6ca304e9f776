"""From SIGKILL of the engine to the next token that a client sees, and where that time goes.

Each trial is a service of its own, so that the supervisor goes on at once, as after any first death. Those of one size have the
same prompts and the same data directory, one after the other: prompts are computed in the first trial and found by the others.
What a trial is held against is how long an engine with the same pools takes to start where none waits (``--standby off``) and
there are no jobs.
"""

import asyncio
import contextlib
import random
import signal
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.durability.figures import Figure, Goal, Section
from benchmarks.durability.setup import (
    MAX_STEP_TOKENS,
    LogEvent,
    Options,
    does_not_fit,
    folder_of,
    log_events,
    pages_for,
    service,
    service_in,
)
from benchmarks.durability.streams import Jobs
from benchmarks.durability.timeline import PARTS, NoRecovery, Recovery, recovery, start_phases
from chaos.cluster import START_TIMEOUT, Cluster
from chaos.processes import wait_until

GOAL = Goal("<=", 1.0)  #: seconds beyond the start of an engine without jobs
_AFTER = 4  #: tokens of each job that are awaited behind the kill
_STEPS = 64  #: that a job may take beyond those in which the others' prompts are computed
_PATIENCE = 1800.0
_LOOK_EVERY = 0.5


def measure(options: Options) -> Section:
    rng = random.Random(options.seed)
    figures: list[Figure] = []
    notes: list[str] = []
    raw: dict[str, Any] = {}
    for jobs in options.kill_jobs:
        max_tokens = most_tokens(options, jobs)
        device_pages = pages_for(jobs, options.kill_prompt + max_tokens)
        host_pages = device_pages
        if why := does_not_fit(options, device_pages, host_pages):
            notes.append(f"{jobs} jobs were left out: {why}.")
            continue
        prompts, pools = options.prompts(rng, jobs, options.kill_prompt), {"device_pages": device_pages, "host_pages": host_pages}
        with folder_of(options, f"kill-{jobs}") as place:
            trials = [_trial(options, place, prompts, pools) for _ in range(options.kill_rounds)]
        figures += _figures(jobs, trials)
        raw[str(jobs)] = [asdict(trial) | {"idle_phases": idle} for trial, idle in trials]
    return Section(figures, raw, notes)


def most_tokens(options: Options, jobs: int) -> int:
    """``max_tokens`` with which the first job still generates when the last one has what it shall have at the kill: one token in
    each step that computes prompts of others."""
    return jobs * options.kill_prompt // MAX_STEP_TOKENS + options.kill_generated + _STEPS


def _figures(jobs: int, measured: list[tuple[Recovery, dict[str, float]]]) -> list[Figure]:
    median = statistics.median
    trials = [(trial, sum(idle.values())) for trial, idle in measured]
    name = f"{jobs} job{'s' if jobs > 1 else ''}"
    parts = {part: median([trial.parts[part] for trial, _ in trials]) for part in PARTS}
    return [
        Figure(f"{name}: kill to the first client's next token", median([t.first for t, _ in trials]), "s"),
        Figure(f"{name}: kill to the median client's next token", median([t.median for t, _ in trials]), "s"),
        Figure(f"{name}: kill to the last client's next token", median([t.last for t, _ in trials]), "s"),
        Figure(f"{name}: start of an engine without jobs", median([idle for _, idle in trials]), "s"),
        Figure(f"{name}: beyond that start, first client", median([t.first - idle for t, idle in trials]), "s", GOAL),
        Figure(f"{name}: beyond that start, last client", median([t.last - idle for t, idle in trials]), "s", GOAL),
        Figure(f"{name}: beyond its own start, last client", median([t.last - t.start for t, _ in trials]), "s"),
        *(Figure(f"{name}: of it, {part.replace('_', ' ')}", seconds, "s") for part, seconds in parts.items()),
        Figure(f"{name}: until the last job had its pages", median([t.all_pages for t, _ in trials]), "s"),
        Figure(f"{name}: from then to the last client's next token", median([t.all_replayed for t, _ in trials]), "s"),
        Figure(f"{name}: pages restored", median([t.pages_restored for t, _ in trials]), "pages"),
        Figure(f"{name}: tokens replayed", median([t.tokens_replayed for t, _ in trials]), "tokens"),
    ]


def _trial(options: Options, place: Path, prompts: list[list[int]], pools: dict[str, int]) -> tuple[Recovery, dict[str, float]]:
    """A recovery, and the seconds that the same engine then takes to start without jobs, by phase."""
    jobs = len(prompts)
    more = {"max_running": str(max(32, jobs)), "standby": options.standby}
    began = time.time()
    with service_in(place, options, **pools, more=more) as cluster:
        if options.standby == "on":
            wait_until(lambda: _standby_waits(cluster, began), START_TIMEOUT, "an engine in waiting", pause=_LOOK_EVERY)
        killed_at, arrivals = asyncio.run(_kill_under_load(cluster, prompts, options.kill_generated, most_tokens(options, jobs)))
        found = recovery(_events(cluster), killed_at, arrivals)
    with service(options, f"start-{jobs}", **pools, more=more | {"standby": "off"}) as cluster:
        return found, _start_without_jobs(cluster)


def _standby_waits(cluster: Cluster, since: float) -> bool:
    return any(event.event == "standby_ready" and event.at > since for event in _events(cluster))


def _start_without_jobs(cluster: Cluster) -> dict[str, float]:
    """Phases of a start. Looked for in the log, and seldom: to ask the service would slow down what is measured."""
    killed_at = time.time()
    cluster.signal("engine", signal.SIGKILL)
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY)
        with contextlib.suppress(NoRecovery):
            return start_phases(_events(cluster), killed_at)
    raise SystemExit(f"the engine did not start again:\n{cluster.log_tail('serve')}")


async def _kill_under_load(
    cluster: Cluster, prompts: list[list[int]], generated: int, max_tokens: int
) -> tuple[float, list[list[float]]]:
    """When the engine was killed, and when the tokens of each job arrived."""
    async with Jobs(cluster.url) as running:
        streams = await running.start(prompts, max_tokens)
        await running.until(streams, [generated] * len(streams), _PATIENCE)
        if any(stream.count >= max_tokens - 4 * _AFTER for stream in streams):
            raise SystemExit("a job ended before the kill: the prompts of the others took too long")
        killed_at = time.time()
        cluster.signal("engine", signal.SIGKILL)
        await asyncio.sleep(_LOOK_EVERY)  # what the old engine had committed may still arrive: a step or two
        await running.until(streams, [stream.count + 2 + _AFTER for stream in streams], _PATIENCE)
        await running.cancel(streams)
        return killed_at, [list(stream.arrivals) for stream in streams]


def _events(cluster: Cluster) -> list[LogEvent]:
    return log_events((cluster.logs / "serve.log").read_text(errors="replace"))
