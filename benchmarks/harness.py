"""What the benchmarks share: a model, engines of any shape, jobs, and sides that are measured in turns."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from tokenizers import Tokenizer

from engine.assembly import make_residency
from engine.core import Engine, StepResult
from engine.identity import root_identity
from engine.model import LoadedModel, load_model
from engine.pools import DevicePool, HostPool, MemoryBacking, PageBacking
from engine.residency import Residency
from engine.runner import make_runner
from engine.sampler import SamplingParams
from engine.scheduler import Budget, Preemption
from engine.sequence import Request
from engine.stats import PageStats
from engine.threads import default_threads
from storage.pool_file import PoolFile

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

PAGE_SIZE, CHUNK = 16, 256  #: the service's defaults
GREEDY = SamplingParams(temperature=0.0, seed=0)

T = TypeVar("T")
#: One side of a comparison: entering and leaving are set-up and clean-up, only what it yields is timed.
Side = Callable[[], AbstractContextManager[Callable[[], T]]]


# --- measuring ----------------------------------------------------------------------------------------------------------


def in_turns(benchmark: "BenchmarkFixture", ours: Side[T], others: Mapping[str, Side[T]], rounds: int) -> dict[str, list[T]]:
    """Run every side ``rounds`` times, one at a time, and return what each gave, round by round; ours is called ``ours``.

    The others go first in even rounds and second in odd ones, so that neither side always finds the machine as the other left it.
    pytest-benchmark times ours. ``extra_info`` gets everybody's ``seconds`` by our own clock, and as ``ratio`` our speed over each
    other's: their median over ours.
    """
    results: dict[str, list[T]] = {name: [] for name in ("ours", *others)}
    seconds: dict[str, list[float]] = {name: [] for name in results}

    def take(name: str, run: Callable[[], T]) -> None:
        began = time.perf_counter()
        result = run()
        seconds[name].append(time.perf_counter() - began)
        results[name].append(result)

    def let_others(count: int) -> None:
        while any(len(seconds[name]) < count for name in others):
            for name, side in others.items():
                with side() as run:
                    take(name, run)

    with ExitStack() as stack:

        def setup() -> tuple[tuple[Callable[[], T]], dict[str, object]]:
            number = len(seconds["ours"])
            let_others(number + 1 - number % 2)
            return (stack.enter_context(ours()),), {}

        benchmark.pedantic(lambda run: take("ours", run), setup=setup, teardown=lambda run: stack.pop_all().close(), rounds=rounds)
    let_others(len(seconds["ours"]))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    benchmark.extra_info["seconds"] = seconds
    benchmark.extra_info["ratio"] = {name: medians[name] / medians["ours"] for name in others}
    return results


# --- engines ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that is measured."""

    model: LoadedModel
    tokenizer: Tokenizer

    @classmethod
    def load(cls, folder: Path) -> "Subject":
        model = load_model(folder, threads=default_threads())
        return cls(model, Tokenizer.from_file(str(folder / "tokenizer.json")))

    def prompt(self, rng: np.random.Generator, length: int) -> list[int]:
        """Random tokens."""
        return [int(token) for token in rng.integers(100, min(self.model.vocab_size, 20_000), length)]

    def pool(self, pages: int, page_size: int = PAGE_SIZE) -> DevicePool:
        """A device pool whose memory is there: first touches are nobody's time."""
        pool = DevicePool(pages, self.model.geometry(page_size))
        pool.tensor.fill_(0)
        return pool

    def residency(
        self, device: DevicePool, host: HostPool | None = None, *, table: Mapping[int, tuple[str, int]] | None = None
    ) -> Residency:
        """With a ``table``, entries have to be published and dropped, as in the service."""
        reserve = 0 if host is None else min(32, max(1, host.manager.total_pages // 8))
        durable = table is not None
        residency = make_residency(device, host, prefill_chunk=CHUNK, durable=durable, reserve=reserve)
        if residency.host is not None and table:
            residency.host.adopt(table)
        return residency

    def engine(self, residency: Residency, budget: Budget, max_context: int | None = None) -> Engine:
        device = residency.cache.device
        return Engine(
            make_runner(self.model, device.tensor, device.geometry.page_size, CHUNK),
            residency,
            self.tokenizer,
            budget,
            max_context=max_context or self.model.max_context,
            eos_token_ids=frozenset(self.model.eos_token_ids),
        )


def make_budget(max_running: int = 32, min_resident_steps: int = 32, preemption: Preemption = Preemption.AUTO) -> Budget:
    return Budget(max_running, max(64, max_running), 2 * CHUNK, CHUNK, preemption, min_resident_steps)


def open_pool(path: Path, device: DevicePool, pages: int) -> PoolFile:
    """A pool file of ``pages`` pages like those of the device pool."""
    geometry = device.geometry
    return PoolFile.open(path, num_pages=pages, page_shape=geometry.page_shape, dtype=geometry.dtype, model_fingerprint="benchmark")


# --- jobs ---------------------------------------------------------------------------------------------------------------


def make_jobs(subject: Subject, lengths: Iterable[tuple[int, int]]) -> list[Request]:
    """Jobs of (prompt, generated) tokens each, on random prompts."""
    rng = np.random.default_rng(0)
    return [make_job(order, subject.prompt(rng, prompt), max_tokens) for order, (prompt, max_tokens) in enumerate(lengths)]


def make_job(order: int, prompt: Iterable[int], max_tokens: int, *, sharing: str = "all") -> Request:
    """A greedy job. It may share pages with those that have the same ``sharing``."""
    root = root_identity("benchmark", sharing)
    return Request(str(order), tuple(prompt), GREEDY, max_tokens, ignore_eos=True, order=order, root=root)


def pages_needed(job: Request, page_size: int = PAGE_SIZE) -> int:
    """Pages the job has at its end; its last token is never fed back."""
    return -(-(len(job.prompt_ids) + job.max_tokens - 1) // page_size)


@dataclass(slots=True)
class Run:
    """What an engine did with some jobs."""

    seconds: float = 0.0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    stats: PageStats = field(default_factory=PageStats)
    prompt_rows: int = 0
    generated_rows: int = 0
    swapped_out: int = 0
    dropped: int = 0
    num_running: list[int] = field(default_factory=list)  #: Sequences at once, in each step that left others waiting
    memory_used: list[float] = field(default_factory=list)  #: in the same steps: share of the held token slots that hold a token
    decode_tokens: int = 0  #: in steps without prompt rows
    decode_seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def tok_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def decode_tok_per_s(self) -> float:
        return self.decode_tokens / self.decode_seconds

    def count(self, result: StepResult, seconds: float) -> None:
        self.prompt_rows += result.prompt_rows
        self.generated_rows += result.generated_rows
        self.swapped_out += len(result.swapped_out)
        self.dropped += len(result.dropped)
        for output in result.outputs:
            self.tokens[output.sequence_id].append(output.token)
        if not result.prompt_rows:
            self.decode_tokens += len(result.outputs)
            self.decode_seconds += seconds


def run_jobs(engine: Engine, jobs: list[Request], on_step: Callable[[], None] = lambda: None) -> Run:
    """From the first request to the last token. ``on_step`` is called after each step."""
    run = Run(tokens={job.sequence_id: [] for job in jobs}, stats=engine.residency.stats)
    began = time.perf_counter()
    for job in jobs:
        engine.add(job)
    while engine.has_work:
        step_began = time.perf_counter()
        result = engine.step()
        run.count(result, time.perf_counter() - step_began)
        _look(engine, run)
        on_step()
    run.seconds = time.perf_counter() - began
    return run


def _look(engine: Engine, run: Run) -> None:
    present = engine.scheduler.running
    if engine.scheduler.waiting and present:
        run.num_running.append(len(present))
        held = sum(len(engine.cache.page_tables[sequence.id]) for sequence in present) * engine.cache.page_size
        run.memory_used.append(sum(sequence.num_stored for sequence in present) / held)


# --- sides ---------------------------------------------------------------------------------------------------------------


@contextmanager
def running(engine: Engine, jobs: list[Request]) -> Iterator[Callable[[], Run]]:
    """A side: the jobs through an engine of its own."""
    try:
        yield lambda: run_jobs(engine, jobs)
        while engine.residency.in_flight:
            engine.residency.collect(0.1)
        engine.check()
    finally:
        engine.residency.close()


def paged(
    subject: Subject,
    jobs: list[Request],
    device_pages: int,
    budget: Budget | None = None,
    *,
    page_size: int = PAGE_SIZE,
    pool_path: Path | None = None,
) -> Side[Run]:
    """The jobs through a new engine with host pages for all of them, in memory or in a pool file."""
    host_pages = sum(pages_needed(job, page_size) for job in jobs)

    @contextmanager
    def side() -> Iterator[Callable[[], Run]]:
        with ExitStack() as stack:
            device = subject.pool(device_pages, page_size)
            if pool_path is None:
                backing: PageBacking = MemoryBacking(host_pages, device.geometry.page_bytes)
            else:
                backing = stack.enter_context(open_pool(pool_path, device, host_pages))
            residency = subject.residency(device, HostPool(host_pages, device.geometry, backing))
            yield stack.enter_context(running(subject.engine(residency, budget or make_budget()), jobs))

    return side


def describe(runs: list[Run]) -> dict[str, float]:
    """Medians over rounds."""

    def median(of: Callable[[Run], float]) -> float:
        return statistics.median(map(of, runs))

    return {
        "tok_per_s": median(lambda run: run.tok_per_s),
        "decode_tok_per_s": median(lambda run: run.decode_tok_per_s),
        "sequences_at_once": median(lambda run: statistics.mean(run.num_running or [len(run.tokens)])),
        "most_at_once": median(lambda run: max(run.num_running, default=len(run.tokens))),
        "memory_used": median(lambda run: statistics.mean(run.memory_used or [0.0])),
        "prompt_rows": median(lambda run: run.prompt_rows),
        "generated_rows": median(lambda run: run.generated_rows),
        "preempted": median(lambda run: run.swapped_out + run.dropped),
        "pages_swapped_out": median(lambda run: run.stats.swapped_out),
        "pages_swapped_in": median(lambda run: run.stats.swapped_in),
        "in_seconds": median(lambda run: run.stats.in_seconds),
        "stall_seconds": median(lambda run: run.stats.stall_seconds),
    }
