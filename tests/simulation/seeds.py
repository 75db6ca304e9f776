"""Running seeds: where their pool files lie, and how a process that runs thousands of them is set up."""

import gc
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numba
import structlog

from tests.simulation.hash_model import Kind, reference
from tests.simulation.product import PRODUCT, Product
from tests.simulation.world import World

_MEMORY = Path("/dev/shm")  #: pool files are made and given up by the thousand; a disk would be the slowest part


@dataclass(frozen=True)
class Outcome:
    digest: str  #: of the trace
    counts: Counter[str]


def run_seed(seed: int, folder: Path, product: Product = PRODUCT) -> Outcome:
    """Raises ``world.Failed`` with the seed and its trace."""
    world = World(seed, folder, product)
    return Outcome(world.run(), world.counts)


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="midsentence-", dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        yield Path(folder)


@contextmanager
def quiet_process() -> Iterator[None]:
    """No log lines; and an idle engine's collection of garbage does not walk what was there before."""
    threads = numba.get_num_threads()
    numba.set_num_threads(1)  # two rows of sixteen logits are no work for a team
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    reference(Kind((1,), max_tokens=1), prefill_chunk=4)  # loads the sampler's kernel, which is a million objects
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        numba.set_num_threads(threads)
        structlog.reset_defaults()
