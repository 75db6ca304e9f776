"""What an engine process is built from: model, pools, identity. And what it refuses before it touches anything."""

import mmap
from dataclasses import dataclass, replace

import torch
from tokenizers import Tokenizer

from engine import exactness, model_source, packed_weights
from engine.geometry import PageGeometry
from engine.model import LoadedModel, load_model
from engine.pools import DevicePool, HostPool
from engine.runner import Runner, make_runner
from engine.threads import default_threads
from service import sizing
from service.errors import RegistrationRefused
from service.logs import get_logger
from service.settings import Settings
from service.store_access import OpenStore
from storage.pool_file import PoolFile
from storage.records import EngineInfo, EngineRecord, Registered, RegisterOutcome

log = get_logger("engine")


@dataclass(frozen=True, slots=True)
class Loaded:
    model: LoadedModel
    fingerprint: str
    tokenizer: Tokenizer
    problems: tuple[str, ...] | None = None  #: what the exactness self-test found; None: it was not made yet


@dataclass(frozen=True, slots=True)
class Parts:
    """What runs the model."""

    loaded: Loaded
    arithmetic_fingerprint: str
    runner: Runner
    device: DevicePool
    host: HostPool | None  #: None: no pool file, so no checkpoints
    pool_file: PoolFile | None
    problems: tuple[str, ...]  #: what the exactness self-test found; empty: exact


def load(settings: Settings) -> Loaded:
    """Load the model. Takes seconds, touches nothing durable."""
    folder = model_source.resolve(settings.model)
    fingerprint = model_source.fingerprint(folder)
    threads = settings.threads or default_threads()
    model = load_model(
        folder,
        weights=settings.weights,
        kv_dtype=settings.kv_dtype,
        threads=threads,
        device=settings.device,
        packed=packed_weights.folder_for(fingerprint, settings.weights),
    )
    tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Loaded(model, fingerprint, tokenizer)


def prove(settings: Settings, loaded: Loaded) -> Loaded:
    """Test that rows do not depend on each other before there is a pool: the test takes pages of its own."""
    smallest = DevicePool(sizing.MIN_PAGES, loaded.model.geometry(settings.page_size), settings.device)
    runner = make_runner(loaded.model, smallest.tensor, settings.page_size, settings.prefill_chunk)
    return replace(loaded, problems=_self_test(settings, runner))


def _self_test(settings: Settings, runner: Runner) -> tuple[str, ...]:
    return tuple(exactness.self_test(runner)) if settings.exactness == "on" else ("exactness is off by --exactness",)


def build_parts(settings: Settings, loaded: Loaded, *, lock_wait: float, memory: mmap.mmap | None = None) -> Parts:
    """Lock the pool file, if there is to be one, make the pools, test that rows do not depend on each other if nobody has."""
    model = loaded.model
    geometry = model.geometry(settings.page_size)
    device_free = _free_memory(settings.device)
    num_pages = sizing.device_pages(settings, geometry.page_bytes, device_free)
    sizing.check_device_pages(num_pages, geometry.page_bytes, device_free)
    pool_file = _open_pool(settings, geometry, loaded.fingerprint, num_pages, lock_wait)
    device = DevicePool(num_pages, geometry, settings.device, memory=memory)
    host = None
    if pool_file is not None:
        host = HostPool(pool_file.num_pages, geometry, pool_file, sync=settings.durability == "machine")
    runner = make_runner(model, device.tensor, settings.page_size, settings.prefill_chunk)
    arithmetic = exactness.arithmetic_fingerprint(
        threads=model.threads,
        weights=settings.weights,
        kv_dtype=settings.kv_dtype,
        prefill_chunk=settings.prefill_chunk,
        page_size=settings.page_size,
        device_facts=runner.device_facts,
    )
    problems = _self_test(settings, runner) if loaded.problems is None else loaded.problems
    for problem in problems:
        log.warning("not_exact", problem=problem)
    return Parts(loaded, arithmetic, runner, device, host, pool_file, problems)


def _free_memory(device: str) -> int | None:
    """Bytes that the model left on an accelerator; None on the CPU."""
    return None if device == "cpu" else torch.cuda.mem_get_info(device)[0]


def _open_pool(
    settings: Settings, geometry: PageGeometry, model_fingerprint: str, num_device_pages: int, lock_wait: float
) -> PoolFile | None:
    """None with ``--host-pages 0``: a file of an earlier life is left as it is, and registration drops its entries.

    The pool's lock protects its bytes. That a data directory has one engine is ``run/engine.lock``'s work, with a pool or without.
    """
    path = settings.data_dir / "pool.safetensors"
    num_pages = sizing.host_pages(settings, geometry.page_bytes, num_device_pages, sizing.existing_pages(path))
    if not num_pages:
        log.warning("no_checkpoints", hint="--host-pages is 0: after a crash jobs recompute all their tokens")
        return None
    pool_file = PoolFile.open(
        path,
        num_pages=num_pages,
        page_shape=geometry.page_shape,
        dtype=geometry.dtype,
        model_fingerprint=model_fingerprint,
        lock_wait=lock_wait,
    )
    if pool_file.replaced is not None:
        log.warning("pool_replaced", reason=pool_file.replaced, hint="pages of the old one are recomputed where they are needed")
    return pool_file


def refuse_other_model(opened: OpenStore, name: str, fingerprint: str) -> None:
    """Before the pool is opened: a pool of another model would be replaced, and with it the pages of the jobs that wait here.

    Registration decides the same again, in one script.
    """
    for record in opened.store.engines():
        if record.info.engine_id == opened.engine_id and record.job_ids and record.info.model_fingerprint != fingerprint:
            raise RegistrationRefused(*_other_model(record, name, fingerprint))


def _other_model(holder: EngineRecord, name: str, fingerprint: str) -> tuple[str, str]:
    return (
        f"jobs of model {holder.info.model_name!r} ({holder.info.model_fingerprint}) are in progress in this data directory, "
        f"and {name!r} ({fingerprint}) was asked for",
        f"start with --model {holder.info.model_name} to finish them, or `midsentence recover --release` to hand them back",
    )


def explain_refusal(answer: Registered, info: EngineInfo) -> tuple[str, str]:
    holder = answer.holder
    assert holder is not None
    if answer.outcome is RegisterOutcome.OTHER_MODEL:
        return _other_model(holder, info.model_name, info.model_fingerprint)
    return (
        f"this data directory is a copy of one in use by {holder.info.host} (pid {holder.info.pid}, {holder.info.engine_id})",
        "stop that engine, or start with an empty --data-dir",
    )
