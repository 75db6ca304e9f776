"""An engine on a tiny model, with or without a pool file, for tests that need no server."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from tokenizers import Tokenizer

from engine.cache import PagedKVCache
from engine.core import Engine, TokenOutput
from engine.model import LoadedModel, load_model
from engine.pools import DevicePool, HostPool, MemoryBacking
from engine.runner import ModelRunner
from engine.sampler import SamplingParams
from engine.scheduler import Budget
from engine.sequence import Request
from recovery.checkpointer import CheckpointConfig, Checkpointer
from recovery.identity import root_identity

PAGE_SIZE, CHUNK = 4, 16
GREEDY = SamplingParams(temperature=0.0, seed=0)
ROOT = root_identity("tiny", "test")


class CheckedMemory(MemoryBacking):
    """Host pages in memory with real checksums: the pool file without the file."""

    poisoned = False

    def write_page(self, page, data):
        super().write_page(page, data)
        return xxhash.xxh3_64_intdigest(self._pages[page])

    def read_page(self, page, out):
        super().read_page(page, out)
        return xxhash.xxh3_64_intdigest(out)

    def sync(self, pages):
        pass

    def flip_bit(self, page):
        self._pages[page, 100] ^= 4


@dataclass
class Rig:
    engine: Engine
    cache: PagedKVCache
    checkpointer: Checkpointer | None = None
    backing: CheckedMemory | None = None
    table: dict = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    outputs: list[TokenOutput] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    admissions: dict = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, request: Request) -> str:
        self.tokens[request.sequence_id] = list(request.generated_ids)
        if self.checkpointer is not None:
            self.checkpointer.enter(request.sequence_id, ROOT)
        return self.engine.add(request)

    def step(self, *, check: bool = True):
        if self.checkpointer is not None:
            self.collect()
        result = self.engine.step()
        for output in result.outputs:
            assert output.index == len(self.tokens[output.sequence_id])
            self.tokens[output.sequence_id].append(output.token)
            if output.finish and self.checkpointer is not None:
                self.checkpointer.leave(output.sequence_id)
        self.outputs += result.outputs
        self.preempted += result.preempted
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

    def collect(self):
        """Copies that completed become entries at once, as with a store that always answers."""
        self.checkpointer.collect()
        publish, drop = self.checkpointer.take_writes()
        for page in drop:
            self.table.pop(page, None)
        self.table |= publish
        self.checkpointer.written(publish, drop)

    def settle(self):
        while self.checkpointer.in_flight:
            self.collect()
        self.collect()

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
) -> Rig:
    """``first_page`` occupies that many pages, so that the same job lands on other ones."""
    geometry = model.geometry(PAGE_SIZE)
    device = DevicePool(pages + first_page, geometry)
    device.manager.allocate(first_page, "elsewhere")
    host = None
    if host_pages:
        backing = backing or CheckedMemory(host_pages, geometry.page_bytes)
        host = HostPool(host_pages, geometry, backing)
    cache = PagedKVCache(device, host)
    rig = Rig(None, cache, backing=backing, table=dict(table or {}))  # type: ignore[arg-type]
    if host is not None:
        rig.checkpointer = Checkpointer(
            device,
            host,
            backing,
            rig.table,
            CheckpointConfig(PAGE_SIZE, CHUNK, reserve=reserve),
            on_problem=lambda event, problem: rig.problems.append(event),
            on_copied=lambda: None,
            on_death=lambda error: rig.problems.append(repr(error)),
        )
    rig.engine = Engine(
        ModelRunner(model, device.tensor, PAGE_SIZE, CHUNK),
        cache,
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        Budget(max_running=max_running, max_step_rows=max_step_rows, max_step_tokens=2 * CHUNK, prefill_chunk=CHUNK),
        max_context=model.max_context,
        eos_token_ids=frozenset(model.eos_token_ids),
        backup=rig.checkpointer,
    )
    return rig


def request(sequence_id, length=10, *, max_tokens=20, seed=None, order=0, **more) -> Request:
    """A job with a random prompt that its id determines; greedy, or sampled when a seed is given."""
    rng = np.random.default_rng(sum(map(ord, sequence_id)))
    prompt = tuple(int(t) for t in rng.integers(10, 500, length))
    sampling = GREEDY if seed is None else SamplingParams(temperature=1.0, top_p=0.95, seed=seed)
    return Request(sequence_id, prompt, sampling, max_tokens, ignore_eos=True, order=order, **more)
