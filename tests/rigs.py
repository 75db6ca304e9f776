"""An engine on a tiny model, with or without a pool file, for tests that need no server."""

import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from tokenizers import Tokenizer

from engine.assembly import Hooks, make_residency
from engine.cache import PagedKVCache
from engine.core import Engine, TokenOutput
from engine.identity import root_identity
from engine.model import LoadedModel, load_model
from engine.pools import DevicePool, HostPool, MemoryBacking
from engine.runner import make_runner
from engine.sampler import SamplingParams
from engine.scheduler import Budget, Preemption
from engine.sequence import Request
from recovery.checkpointer import Checkpointer

PAGE_SIZE, CHUNK = 4, 16
GREEDY = SamplingParams(temperature=0.0, seed=0)
ROOT = root_identity("tiny", "test")


class CheckedMemory(MemoryBacking):
    """Host pages in memory with real checksums: the pool file without the file."""

    def write_pages(self, first, data):
        super().write_pages(first, data)
        return self._checksums(first, data)

    def read_pages(self, first, out):
        super().read_pages(first, out)
        return self._checksums(first, out)

    def _checksums(self, first, data):
        return [xxhash.xxh3_64_intdigest(page.data) for page in self._extent(first, data)]

    def flip_bit(self, page):
        self.pages[page, 100] ^= 4


@dataclass
class Rig:
    engine: Engine
    cache: PagedKVCache
    checkpointer: Checkpointer | None = None
    backing: CheckedMemory | None = None
    table: dict = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    outputs: list[TokenOutput] = field(default_factory=list)
    swapped: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    admissions: dict = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, request: Request) -> str:
        self.tokens[request.sequence_id] = list(request.generated_ids)
        return self.engine.add(request)

    @property
    def stats(self):
        return self.engine.residency.stats

    def step(self, *, check: bool = True):
        result = self.engine.step()
        if self.checkpointer is not None:
            self.exchange()
        for output in result.outputs:
            assert output.index == len(self.tokens[output.sequence_id])
            self.tokens[output.sequence_id].append(output.token)
        self.outputs += result.outputs
        self.swapped += result.swapped_out
        self.dropped += result.dropped
        self.admissions |= {a.sequence_id: a for a in result.admissions}
        if check:
            self.engine.check()
        return result

    def run(self, max_steps=10_000):
        for _ in range(max_steps):
            if not self.engine.has_work:
                return self.tokens
            self.step()
        raise AssertionError("the engine did not finish")

    def exchange(self):
        """Entries become durable at once, as with a store that always answers."""
        publish, drop = self.checkpointer.take_writes()
        for page in drop:
            self.table.pop(page, None)
        self.table |= publish
        self.checkpointer.written(publish, drop)

    def settle(self):
        """Until no copy is in flight and every entry is written."""
        while self.engine.residency.in_flight:
            assert self.engine.residency.collect(0.1) == []
        self.exchange()

    @property
    def in_use(self):
        """Device pages that somebody needs: all but free and cached ones."""
        return self.cache.gpu_manager.total_pages - self.engine.residency.available

    def text(self, sequence_id):
        return "".join(o.text for o in self.outputs if o.sequence_id == sequence_id)


def load(folder: Path) -> LoadedModel:
    return load_model(folder, threads=2)


def make_rig(
    folder: Path,
    model: LoadedModel,
    *,
    pages=64,
    max_running=8,
    max_step_rows=32,
    host_pages=0,
    table=None,
    backing=None,
    first_page=0,
    reserve=2,
    eviction="arc",
    preemption="auto",
    retention_seconds=None,
    clock=time.monotonic,
    **budget,
) -> Rig:
    """``first_page`` occupies that many pages, so that the same job lands on other ones."""
    geometry = model.geometry(PAGE_SIZE)
    device = DevicePool(pages + first_page, geometry)
    device.manager.allocate(first_page, "elsewhere")
    host = None
    if host_pages:
        backing = backing or CheckedMemory(host_pages, geometry.page_bytes)
        host = HostPool(host_pages, geometry, backing)
    rig = Rig(None, None, backing=backing, table=dict(table or {}))  # type: ignore[arg-type]
    residency = make_residency(
        device,
        host,
        prefill_chunk=CHUNK,
        eviction=eviction,
        durable=True,
        reserve=reserve,
        retention_seconds=retention_seconds,
        clock=clock,
        hooks=Hooks(
            on_problem=lambda event, problem: rig.problems.append(event),
            on_death=lambda error: rig.problems.append(repr(error)),
        ),
    )
    rig.cache = residency.cache
    if residency.host is not None:
        rig.checkpointer = Checkpointer(residency.host)
        rig.checkpointer.adopt(rig.table)
    rig.engine = Engine(
        make_runner(model, device.tensor, PAGE_SIZE, CHUNK),
        residency,
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        Budget(
            max_running, max_step_rows, max_step_tokens=2 * CHUNK, prefill_chunk=CHUNK, preemption=Preemption(preemption), **budget
        ),
        max_context=model.max_context,
        eos_token_ids=frozenset(model.eos_token_ids),
    )
    return rig


def request(sequence_id, length=10, *, max_tokens=20, seed=None, order=0, **more) -> Request:
    """A job with a random prompt that its id determines; greedy, or sampled when a seed is given."""
    rng = np.random.default_rng(zlib.crc32(sequence_id.encode()))
    prompt = tuple(int(t) for t in rng.integers(10, 500, length))
    sampling = GREEDY if seed is None else SamplingParams(temperature=1.0, top_p=0.95, seed=seed)
    return Request(sequence_id, prompt, sampling, max_tokens, ignore_eos=True, order=order, root=ROOT, **more)
