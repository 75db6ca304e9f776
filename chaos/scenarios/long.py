"""Everything in turn for a long time, under settings that change with each start, and then a long life of whoever is left."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from signal import SIGKILL
from statistics import linear_regression
from typing import Any

from chaos.cluster import Cluster
from chaos.faults.base import FOLLOW_TIMEOUT, Fault, Proof
from chaos.faults.network import BAD_NETWORKS
from chaos.faults.signals import KillForGood, Suspend
from chaos.processes import Vitals, vitals, wait_until
from chaos.proxy import Proxy
from chaos.scenario import Scenario, counts, random_moment, start_behind_proxy
from chaos.stage import Stage

_MIB = 1 << 20
#: What each start draws from. Not what is part of a page's identity: page size, chunks, threads, number formats.
_CHOICES: Mapping[str, Sequence[str]] = {
    "max_running": ("2", "6", "16", "32"),
    "max_step_tokens": ("64", "128", "256"),
    "max_step_rows": ("32", "128", "512"),
    "lease_seconds": ("3", "4", "8"),
    "durability": ("process", "machine"),
    "preemption": ("auto", "swap", "replay"),
    "eviction": ("arc", "lru", "fifo"),
}
_DEVICE_PAGES = (64, 80, 160, 240)
_HOST_PAGES = (120, 240, 480)
_STORM_SHARE = 0.3  #: of the time, with kills; behind it nobody dies any more
_WARM_SHARE = 0.4  #: of the rest, in which caches fill
_GROWTH = 1.0  #: MiB a minute that a process may grow by, once it is warm ...
_NOISE = 4.0  #: ... and MiB in all that say nothing
#: Descriptors that may come on top: an api opens connections to Redis as it needs them, and keeps them.
_MORE_DESCRIPTORS = {"engine": 4, "api": 40}


@dataclass(frozen=True, slots=True)
class KillAndChange:
    """SIGKILL, and back as the cluster's options say by then."""

    role: str
    start: Callable[[], None]
    settings: str

    @property
    def name(self) -> str:
        return f"SIGKILL {self.role}, other settings"

    def apply(self, cluster: Cluster) -> Proof:
        old = cluster.signal(self.role, SIGKILL)
        wait_until(lambda: cluster.family.gone(old), FOLLOW_TIMEOUT, f"the end of {self.role}")
        self.start()
        return Proof(True, f"{self.role} {old} -> {cluster.require_pid(self.role)}: {self.settings}")


def long_mix(stage: Stage, minutes: int) -> None:
    cluster, rng = stage.cluster, stage.rng
    _change(cluster, rng)
    proxy = start_behind_proxy(stage)
    second = cluster.another_engine("second")
    began, seconds = time.monotonic(), 60.0 * minutes
    with stage.traffic():
        while time.monotonic() < began + _STORM_SHARE * seconds:
            random_moment(stage)
            stage.inflict(_kill(stage) if rng.random() < 0.6 else _disturb(stage, proxy))
            if rng.random() < 0.3:  # one engine more, or one less
                if cluster.pid(second.name) is None:
                    cluster.start_engine(second)
                else:
                    stage.inflict(KillForGood(second))
        if cluster.pid(second.name) is not None:
            stage.inflict(KillForGood(second))
        cluster.wait_ready()
        stage.wait_progress(100)
        samples = _live_on(stage, proxy, began + seconds)
    for role in ("engine", "api"):
        _judge(stage, role, samples[role])


def _change(cluster: Cluster, rng: Random) -> str:
    """Other settings for whoever starts next; in words."""
    settings = {name: rng.choice(values) for name, values in _CHOICES.items()}
    sizes: dict[str, Any] = {"device_pages": rng.choice(_DEVICE_PAGES), "host_pages": rng.choice(_HOST_PAGES)}
    cluster.options = replace(cluster.options, settings=settings, **sizes)
    return " ".join(f"{name}={value}" for name, value in (sizes | settings).items())


def _kill(stage: Stage) -> Fault:
    cluster = stage.cluster
    starts: dict[str, Callable[[], None]] = {
        "engine": cluster.start_engine, "api": cluster.start_api, "redis": cluster.start_redis
    }  # fmt: skip
    role = stage.rng.choice(["engine", "engine", "engine", "api", "redis"])
    return KillAndChange(role, starts[role], _change(cluster, stage.rng))


def _disturb(stage: Stage, proxy: Proxy) -> Fault:
    """What nobody dies of."""
    rng = stage.rng
    if rng.random() < 0.4:
        return Suspend(rng.choice(["engine", "redis", "api"]), rng.uniform(0.5, 9.0))
    return rng.choice(BAD_NETWORKS)(proxy, rng)


def _live_on(stage: Stage, proxy: Proxy, until: float) -> dict[str, list[tuple[float, Vitals]]]:
    """Disturbed, but alive to the end: what each process holds, from when it is warm."""
    samples: dict[str, list[tuple[float, Vitals]]] = {"engine": [], "api": []}
    warm = time.monotonic() + _WARM_SHARE * (until - time.monotonic())
    while time.monotonic() < until or len(samples["api"]) < 3:
        random_moment(stage)
        stage.inflict(_disturb(stage, proxy))
        if time.monotonic() >= warm:
            for role, found in samples.items():
                found.append((time.monotonic() / 60.0, vitals(stage.cluster.require_pid(role))))
    return samples


def _judge(stage: Stage, role: str, samples: Sequence[tuple[float, Vitals]]) -> None:
    minutes, held = [at for at, _ in samples], [vital for _, vital in samples]
    slope = linear_regression(minutes, [vital.resident / _MIB for vital in held]).slope
    grown = slope * (minutes[-1] - minutes[0])
    first, last = held[0], held[-1]
    stage.notes.append(f"{role}: {slope:+.2f} MiB/min over {minutes[-1] - minutes[0]:.1f} min; {first} -> {last}")
    if len({vital.pid for vital in held}) > 1:
        stage.violate("I12", f"{role} died, though nobody killed it", evidence=str(held))
    if slope > _GROWTH and grown > _NOISE:
        stage.violate("I12", f"{role} grows by {slope:.1f} MiB a minute", evidence=f"{first} {last}")
    if last.descriptors > first.descriptors + _MORE_DESCRIPTORS[role]:
        stage.violate("I12", f"{role} holds more and more descriptors", evidence=f"{first} {last}")


SCENARIOS = (
    Scenario(
        "long_mix",
        long_mix,
        runs=counts(0, 1, 1),
        faults=counts(0, 2, 30),  # minutes
        covers="S39",
        meaning="minutes of kills, pauses and bad networks under settings that change with each start; then nothing may grow",
    ),
)
