"""What the sections share: their sizes, services to measure, and what /proc and the logs tell of an engine."""

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.harness import CHUNK, PAGE_SIZE
from chaos.cluster import Cluster
from chaos.place import ClusterOptions, private_place
from engine.threads import default_threads
from service.model_size import model_size

MIB = 1 << 20
MAX_STEP_TOKENS = 2 * CHUNK  #: prompt tokens of one step, as the service has it by default
_SPARE_MEMORY, _SPARE_DISK = 2 << 30, 4 << 30  #: bytes left to everybody else


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes of all sections. Lengths in tokens."""

    folder: Path  #: of the model
    place: Path  #: a folder on a disk
    rounds: int = 5
    batches: tuple[int, ...] = (8, 32)
    prompt: int = 64
    tokens: int = 128
    contexts: tuple[int, ...] = (256, 1024, 4096)
    kill_rounds: int = 5
    kill_jobs: tuple[int, ...] = (1, 16, 64)
    kill_prompt: int = 1900
    kill_generated: int = 100
    standby: str = "on"  #: whether an engine waits to take over at the kill
    growth_jobs: int = 2000
    seed: int = 0

    def quick(self) -> "Options":
        """Shows that everything runs; the figures mean nothing."""
        return Options(
            self.folder, self.place, rounds=1, batches=(4,), prompt=32, tokens=64, contexts=(64, 256), kill_rounds=1,
            kill_jobs=(1, 4), kill_prompt=190, kill_generated=10, growth_jobs=200, seed=self.seed,
        )  # fmt: skip

    @property
    def page_bytes(self) -> int:
        return model_size(self.folder).page_bytes(PAGE_SIZE)

    def prompts(self, rng: random.Random, count: int, length: int) -> list[list[int]]:
        """Random tokens: no two jobs share a page."""
        vocab = int(json.loads((self.folder / "config.json").read_text())["vocab_size"])
        return [[rng.randrange(100, min(vocab, 20_000)) for _ in range(length)] for _ in range(count)]


def pages_for(jobs: int, tokens: int) -> int:
    """Device pages with which that many jobs of that many tokens run at once and nobody is preempted."""
    return jobs * (-(-tokens // PAGE_SIZE) + 3) + 64


@contextmanager
def folder_of(options: Options, name: str) -> Iterator[Path]:
    """A folder for a service, or for one after the other with the same data; removed at the end."""
    place = private_place(options.place, name)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def service(
    options: Options, name: str, *, device_pages: int, host_pages: int, more: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Cluster]:
    """The real service with its default settings but ``more``, ready, in a folder of its own."""
    sizes = {"device_pages": device_pages, "host_pages": host_pages}
    with folder_of(options, name) as place, service_in(place, options, **sizes, more=more) as cluster:
        yield cluster


@contextmanager
def service_in(
    place: Path, options: Options, *, device_pages: int, host_pages: int, more: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Cluster]:
    """The same, in a folder that may hold what an earlier one left."""
    settings = {
        "prefill_chunk": str(CHUNK),
        "max_step_tokens": str(MAX_STEP_TOKENS),
        "threads": str(default_threads()),
        "lease_seconds": "10",
        "log_format": "json",
        **more,
    }
    with Cluster(place, ClusterOptions(str(options.folder), PAGE_SIZE, device_pages, host_pages, settings)) as cluster:
        cluster.serve()
        yield cluster


def does_not_fit(options: Options, device_pages: int, host_pages: int) -> str:
    """Why these pools do not fit this machine now; empty when they do. The pool file's pages are in memory, too: page cache."""
    device, host = device_pages * options.page_bytes, host_pages * options.page_bytes
    memory, disk = available_memory() - _SPARE_MEMORY, shutil.disk_usage(options.place).free - _SPARE_DISK
    if device + host > memory:
        return f"{(device + host) // MIB:,} MiB of pages, {max(0, memory) // MIB:,} MiB of memory to spare"
    return f"a pool file of {host // MIB:,} MiB, {max(0, disk) // MIB:,} MiB of disk to spare" if host > disk else ""


def available_memory() -> int:
    return _kib(Path("/proc/meminfo"), "MemAvailable")


def process_memory(pid: int, key: str) -> int:
    """Bytes: ``VmHWM`` (peak), ``VmRSS``, ``RssAnon``, ``RssFile``."""
    return _kib(Path(f"/proc/{pid}/status"), key)


def _kib(path: Path, key: str) -> int:
    (line,) = (line for line in path.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def bytes_written(pid: int) -> int:
    """Bytes that a process handed to write calls on files: pool file and log; what goes to sockets is sent, not written."""
    return int(dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())["wchar"])


def metric(cluster: Cluster, name: str, **labels: str) -> float:
    """One value of the engine's metrics. Raises KeyError where there is none."""
    answer = httpx.get(f"http://127.0.0.1:{cluster.main.port}/metrics", timeout=10.0, trust_env=False)
    for family in text_string_to_metric_families(answer.raise_for_status().text):
        for sample in family.samples:
            if sample.name == f"midsentence_{name}" and labels.items() <= sample.labels.items():
                return float(sample.value)
    raise KeyError(name)


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One line of a structured log."""

    at: float  #: seconds of the wall clock
    event: str
    fields: dict[str, Any]


def log_events(text: str, process: str = "engine") -> list[LogEvent]:
    """Events of one process in a log that several write to; what is no JSON object is left out."""
    events = []
    for line in text.splitlines():
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if isinstance(fields, dict) and fields.get("process") == process:
            events.append(LogEvent(datetime.fromisoformat(fields["timestamp"]).timestamp(), fields["event"], fields))
    return events


def machine() -> dict[str, Any]:
    """Where it was measured."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else "unknown",
        "cores": os.cpu_count(),
        "threads": default_threads(),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB,
    }
