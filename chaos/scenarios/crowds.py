"""Clients that cost a server more than they are worth. Whoever behaves must not notice them."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from chaos.faults.crowds import HALF_CLOSED, IDLE, MANNERS, NEVER_READ, RESET, SLOW_BODIES, SLOW_HEADS, Crowd, Manner, connections
from chaos.history import JobSeen
from chaos.processes import Timeout, vitals, wait_until
from chaos.scenario import Scenario, counts, serve
from chaos.stage import Stage
from chaos.workload import Case
from storage.records import JobStatus

_PATIENCE = 60.0
_LOOK_SECONDS = 5.0
#: The api's own longest patience is 60 s, for who never reads; then the kernel needs a moment.
#: So many more than run at once that somebody is always before the job that the silent streams wait for.
_CLIENTS = 16
_TOLD_TIMEOUT = 15.0
_SHED_TIMEOUT = 90.0
_SLOWEST = 0.5  #: of the speed without them; the driver's own share of a small machine is in this, too
_MEMORY = 64 << 20  #: bytes that the api may need more for all of them together
_STORE_CONNECTIONS = 40  #: the api opens these as it needs them, and keeps them


def crowds(stage: Stage, arrivals: int) -> None:
    """One crowd after the other, and all of them together. The engine's speed is compared within this run."""
    serve(stage)
    manners = [MANNERS[number % len(MANNERS)] for number in range(arrivals)]
    client, jobs = stage.client("host"), dict[str, str]()
    with stage.traffic(stage.catalogue.longest(8), clients=_CLIENTS, cancel_share=0.0) as traffic:
        done = client.submit(stage.catalogue.longest(1)[0], _PATIENCE) or ""
        jobs[done] = stage.catalogue.longest(1)[0].name
        stage.wait_ended([done])
        waiting = client.submit(_last(stage), _PATIENCE) or ""
        jobs[waiting] = _last(stage).name
        api = stage.cluster.require_pid("api")
        before, alone = vitals(api), _speed(stage, 2 * _LOOK_SECONDS)
        crowd_of: list[Crowd] = []
        beside, peak = 0.0, 0
        for manner in manners:
            crowd = Crowd(manner, _openings(manner, done, waiting, traffic.live_jobs()))
            stage.resources.callback(crowd.close)
            crowd_of.append(crowd)
            stage.inflict(crowd)
            speed = _speed(stage, _LOOK_SECONDS)
            beside += speed / len(manners)
            peak = max(peak, vitals(api).resident)
            stage.notes.append(f"{crowd.name}: {speed:.0f} tokens/s, alone {alone:.0f}")
        _shed(stage, crowd_of)
        client.cancel(waiting, _PATIENCE)
        _told(stage, [crowd for crowd in crowd_of if crowd.manner is IDLE], client.get(waiting).seen)
        for crowd in crowd_of:
            crowd.close()
        after, alone_again = _left(stage, crowd_of, api), _speed(stage, 2 * _LOOK_SECONDS)
    stage.judge(jobs)
    client.close()
    ratio = beside / ((alone + alone_again) / 2)
    grown = (peak - before.resident) / (1 << 20)
    stage.notes.append(f"speed {ratio:.2f} of {alone:.0f} and {alone_again:.0f} tokens/s; api {grown:+.0f} MiB at its peak")
    if ratio < _SLOWEST:
        stage.violate("I8", f"the engine ran at {ratio:.2f} of its speed beside {len(crowd_of)} crowds")
    if peak - before.resident > _MEMORY:
        stage.violate("I12", f"the api grew by {grown:.0f} MiB", evidence=f"{before}")
    if after > before.descriptors + _STORE_CONNECTIONS:
        stage.violate("I12", f"the api had {before.descriptors} descriptors, and has {after} when all are gone")


def _last(stage: Stage) -> Case:
    """It waits for as long as there is another job."""
    case = stage.catalogue.longest(1)[0]
    return replace(case, body={**case.body, "priority": -100})


def _openings(manner: Manner, done: str, waiting: str, live: Sequence[str]) -> list[bytes]:
    body = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + b" " * 50_000
    said: Mapping[str, list[bytes]] = {
        NEVER_READ.name: [_events(done) * 50],  # one answer after the other, until the buffers of both kernels are full
        SLOW_HEADS.name: [b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nX-Slow: "],
        SLOW_BODIES.name: [body],
        IDLE.name: [_events(waiting)],
        HALF_CLOSED.name: [_events(job_id) for job_id in (waiting, *live)],
        RESET.name: [_events(job_id) for job_id in (waiting, *live)],
    }
    return said[manner.name]


def _events(job_id: str) -> bytes:
    return f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def _speed(stage: Stage, seconds: float) -> float:
    """Tokens a second, of the engine."""
    began, before = time.monotonic(), stage.metrics()["generation_tokens_total"]
    time.sleep(seconds)
    return (stage.metrics()["generation_tokens_total"] - before) / (time.monotonic() - began)


def _shed(stage: Stage, crowd_of: Sequence[Crowd]) -> None:
    """Who stays without need is shown out by the server; its own clients never have to end it."""
    unwanted = [crowd for crowd in crowd_of if not crowd.manner.may_stay]

    def left() -> dict[str, int]:
        held = connections(stage.cluster.port)
        return {crowd.name: count for crowd in unwanted if (count := crowd.left(held))}

    try:
        wait_until(lambda: not left(), _SHED_TIMEOUT, "the end of connections that nobody uses", pause=0.5)
    except Timeout:
        stage.violate("I12", f"the api still holds connections after {_SHED_TIMEOUT:g} s", evidence=str(left()))


def _told(stage: Stage, idle: Sequence[Crowd], job: JobSeen | None) -> None:
    """Whoever waited in silence is told how the job ended: cancelled, or completed if it had its turn after all."""
    end = b"event: cancelled" if job is not None and job.status == JobStatus.CANCELLED else b"event: done"
    for crowd in idle:
        if (told := _count_told(crowd, end)) != crowd.manner.count:
            stage.violate("I2", f"{told} of {crowd.manner.count} silent streams were told the end of their job")


def _count_told(crowd: Crowd, end: bytes) -> int:
    """How many of them have heard of the end, once all have, or when the time for it is over."""
    heard = [b""] * crowd.manner.count

    def told() -> int:
        heard[:] = [before + more for before, more in zip(heard, crowd.answers(), strict=True)]
        return sum(end in answer for answer in heard)

    with contextlib.suppress(Timeout):
        wait_until(lambda: told() == crowd.manner.count, _TOLD_TIMEOUT, "the end of a job on every silent stream", pause=0.1)
    return told()


def _left(stage: Stage, crowd_of: Sequence[Crowd], api: int) -> int:
    """Descriptors of the api when all of them are gone."""
    wait_until(
        lambda: not any(crowd.left(connections(stage.cluster.port)) for crowd in crowd_of), 30.0, "the end of all crowds", pause=0.1
    )
    return vitals(api).descriptors


SCENARIOS = (
    Scenario(
        "crowds",
        crowds,
        runs=counts(0, 1, 2),
        faults=counts(0, 6, 12),
        covers="S36",
        meaning="hundreds that never read, crawl, stay silent, half close or reset: shown out; the others' speed and tokens stay",
        settings={"max_running": "6"},
    ),
)
