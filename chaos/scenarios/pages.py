"""Pages that are not what was written, and a disk that refuses."""

from collections.abc import Callable

from chaos.faults.base import Fault
from chaos.faults.damage import FlipBit, PutBack, SwapPages, copy_of
from chaos.faults.points import EngineError
from chaos.faults.signals import KillEverything, KillForGood
from chaos.guarantees import check_undisturbed
from chaos.plans import check_plan, planned_recovery, sealed_pages
from chaos.processes import wait_until
from chaos.scenario import Scenario, counts, random_moment, serve, start_apart
from chaos.stage import Stage


def bit_flips(stage: Stage, flips: int) -> None:
    """Bits of sealed pages."""
    _damage(stage, flips, lambda pages: [FlipBit(page, stage.rng.randrange(1 << 30)) for page in pages])


def page_swaps(stage: Stage, swaps: int) -> None:
    """Whole pages in each other's place: every byte is one that the engine wrote, for somebody else."""
    _damage(stage, 2 * swaps, lambda pages: [SwapPages(*pair) for pair in zip(pages[::2], pages[1::2], strict=True)])


def _damage(stage: Stage, count: int, make: Callable[[list[int]], list[Fault]]) -> None:
    """All jobs are alive, so every page in the table is one that a job will want back."""
    serve(stage)
    with stage.traffic(stage.catalogue.longest(8), once=True, cancel_share=0.0, reread_share=0.0):
        wait_until(lambda: len(sealed_pages(stage)) >= 8 + count, 60.0, "sealed pages")
        pages = stage.rng.sample(sorted(sealed_pages(stage)), count)
        stage.inflict(KillEverything())
        clean = planned_recovery(stage)
        for fault in make(pages):
            stage.inflict(fault)
        damaged = planned_recovery(stage)
        received = stage.history.tokens
        stage.cluster.serve()
        stage.wait_progress(20, since=received)  # all jobs may have ended before the service was found ready
        failures = stage.metrics()["page_verify_failures_total"]
        restored = sum(job.pages_restored for job in clean), sum(job.pages_restored for job in damaged)
        stage.notes.append(f"{count} pages damaged: {failures:g} refused, to be restored {restored[0]} -> {restored[1]}")
        if not 1 <= failures <= count:
            stage.violate("I11", f"{count} pages are damaged, {failures:g} were refused by checksum")
        if restored[1] >= restored[0]:
            stage.violate("I11", "recover --dry-run counts on damaged pages", evidence=str(restored))
        check_plan(stage, damaged, {})


def old_pools(stage: Stage, times: int) -> None:
    """The pool file alone is put back from a copy: its pages are old, the entries in Redis are not. Replays, nothing else."""
    serve(stage)
    cluster = stage.cluster
    pool, copy = cluster.main.data_dir / "pool.safetensors", cluster.place / "pool.copy"
    with stage.traffic():
        for _ in range(times):
            random_moment(stage)
            copy_of(pool, copy)
            stage.wait_progress(400)
            stage.inflict(KillEverything())
            stage.inflict(PutBack(pool, copy))
            cluster.serve()
            stage.wait_progress(50)


def disk_errors(stage: Stage, rounds: int) -> None:
    """The disk refuses once, or is full in the middle of a page: the engine goes on, without what was to be written."""
    cluster = start_apart(stage)
    points = ("pool.before_write=eio", "pool.mid_write=partial", "pool.before_sync=eio", "store_file.before_rename=eio")
    faults = [EngineError(point, stage.rng.choice([1, 2, 5])) for point in points for _ in range(rounds)]
    stage.rng.shuffle(faults)
    with stage.traffic():
        stage.wait_progress(20)
        stage.inflict(KillForGood(cluster.main))
        for fault in faults:
            stage.inflict(fault)
            stage.wait_progress(100)
            stage.inflict(KillForGood(cluster.main))
        cluster.start_engine()


SCENARIOS = (
    Scenario(
        "bit_flips",
        bit_flips,
        runs=counts(1, 5, 40),
        faults=counts(2, 5, 5),
        covers="S19",
        meaning="bits flipped in sealed pages while down: replayed, same text",
        device_pages=400,
    ),
    Scenario(
        "page_swaps",
        page_swaps,
        runs=counts(0, 4, 10),
        faults=counts(0, 3, 5),
        covers="S20",
        meaning="whole pages in each other's place while down: refused, replayed, same text",
        device_pages=400,
    ),
    Scenario(
        "old_pools",
        old_pools,
        runs=counts(0, 1, 3),
        faults=counts(0, 4, 10),
        covers="S13",
        meaning="the pool file alone put back from a copy: replays only",
    ),
    Scenario(
        "disk_errors",
        disk_errors,
        runs=counts(1, 1, 3),
        faults=counts(1, 5, 10),
        covers="S22 S24",
        meaning="EIO and a full disk in page writes, fdatasync and store.json: the engine goes on",
        checkers=(check_undisturbed,),
        settings={"durability": "machine"},
        host_pages=160,
        seconds=240,
    ),
)
