"""``CudaSwap`` without CUDA: staging, verification and the order of events, over lanes that stand in for streams.

``LateLane`` does its work as late as it may: a copy runs when somebody waits for it, and the computation when a copy that comes
after it runs. What CudaSwap forgets to wait for is then seen in the bytes. ``EarlyLane`` copies at once, as a device may too.
"""

import threading

import numpy as np
import pytest
import torch
import xxhash

from engine.cuda_swap import CudaSwap
from engine.geometry import PageGeometry
from engine.pools import DevicePool, HostPool, MemoryBacking
from engine.swap import Direction, PageMove, ThreadSwap, Transfer
from engine.swap_factory import make_swap
from tests.rigs import CheckedMemory

GEOMETRY = PageGeometry(num_layers=3, page_size=2, num_kv_heads=1, head_dim=4, dtype="bfloat16")
PAGES = 24
OUT, IN = Direction.OUT, Direction.IN


class Log:
    """What happened, in order, from all threads."""

    def __init__(self):
        self._events, self._lock = [], threading.Lock()

    def add(self, *event):
        with self._lock:
            self._events.append(event)

    def of(self, *kinds):
        with self._lock:
            return [event for event in self._events if event[0] in kinds]


class Work:
    """A stream: things to do, done in order, no earlier than somebody waits for them."""

    def __init__(self, log=None, name=""):
        self._todo, self._done, self._log, self._name, self._lock = [], 0, log, name, threading.RLock()

    def add(self, action):
        with self._lock:
            self._todo.append(action)

    def mark(self):
        with self._lock:
            return Mark(self, len(self._todo))

    def run_until(self, count):
        with self._lock:
            while self._done < count:
                self._done += 1
                self._todo[self._done - 1]()


class Mark:
    def __init__(self, work, count):
        self.work, self.count = work, count

    def synchronize(self):
        if self.work._log is not None:
            self.work._log.add("waited", self.work._name, self.count)
        self.work.run_until(self.count)


class LateLane:
    """A ``Lane`` over plain memory; ``fail`` names a verb that raises from now on."""

    early = False

    def __init__(self, pool, way, log, computation):
        self._pages, self._way, self._log, self._computation = pool.bytes.numpy(), way, log, computation
        self._copies = Work(log, way)
        self.staging = tuple(np.zeros((PAGES, GEOMETRY.page_bytes), np.uint8) for _ in range(2))
        self.fail = None

    def mark(self):
        self._check("mark")
        return self._computation.mark()

    def after(self, mark):
        self._check("after")
        self._log.add("after", self._way)
        self._copies.add(lambda: self._computation.run_until(mark.count))

    def copy(self, buffer, at, device_page, num_pages):
        self._check("copy")
        self._log.add("copy", self._way, buffer, device_page, num_pages)
        staged, pages = self.staging[buffer][at : at + num_pages], self._pages[device_page : device_page + num_pages]
        source, target = (pages, staged) if self._way is OUT else (staged, pages)
        self._copies.add(lambda: np.copyto(target, source))
        mark = self._copies.mark()
        if self.early:
            self._copies.run_until(mark.count)
        return mark

    def drain(self):
        self._log.add("drain", self._way)
        self._copies.mark().synchronize()

    def join(self, mark):
        self._check("join")
        self._log.add("join", mark.count)

    def _check(self, verb):
        if verb == self.fail:
            raise RuntimeError(f"CUDA error in {verb}")


class EarlyLane(LateLane):
    early = True


class Backing(CheckedMemory):
    """Host pages that keep a log, and fail where they are told to."""

    def __init__(self, log):
        super().__init__(PAGES, GEOMETRY.page_bytes)
        self.log, self.failing, self.death, self.sync_fails = log, set(), None, False

    def write_pages(self, first, data):
        self._check(first, data)
        self.log.add("write", first)
        return super().write_pages(first, data)

    def read_pages(self, first, out):
        self._check(first, out)
        self.log.add("read", first)
        return super().read_pages(first, out)

    def sync(self, pages):
        self.log.add("sync", *pages)
        if self.sync_fails:
            raise OSError("no sync")

    def _check(self, first, data):
        if self.death is not None:
            raise self.death
        if self.failing & set(range(first, first + data.size // self.pages.shape[1])):
            raise OSError(f"page {first} fails")


class Rig:
    def __init__(self, lane_class=LateLane, *, sync=False, **callbacks):
        self.log = Log()
        self.computation = Work()
        self.device = DevicePool(PAGES, GEOMETRY)
        self.backing = Backing(self.log)
        self.lanes = {way: lane_class(self.device, way, self.log, self.computation) for way in Direction}
        self.swap = CudaSwap(
            self.device,
            HostPool(PAGES, GEOMETRY, self.backing, sync=sync),
            lanes=self.lanes,
            on_completed=lambda: self.log.add("completed"),
            **callbacks,
        )
        rng = np.random.default_rng(0)
        self.device.bytes.copy_(torch.from_numpy(rng.integers(0, 256, (PAGES, GEOMETRY.page_bytes)).astype(np.uint8)))

    def page(self, number):
        return self.device.bytes[number].numpy().copy()

    def run(self, way, moves, durable=False):
        self.swap.submit(Transfer(way, tuple(moves), durable))
        (done,) = self.swap.completed(wait=10)
        return done


@pytest.fixture(params=[LateLane, EarlyLane])
def rig(request):
    made = Rig(request.param)
    yield made
    made.swap.close()


def moves(pairs, checksums=None):
    return [PageMove(device, host, (checksums or {}).get(host, 0)) for device, host in pairs]


def test_pages_go_out_and_come_back_elsewhere(rig):
    away = [(0, 5), (1, 6), (2, 7), (9, 0), (4, 20), (5, 21), (11, 3), (12, 2)]
    content = {host: rig.page(device) for device, host in away}
    out = rig.run(OUT, moves(away))
    assert out.problems == ("",) * len(away)
    assert out.checksums == tuple(xxhash.xxh3_64_intdigest(content[host]) for _, host in away)
    assert all((rig.backing.pages[host] == content[host]).all() for host in content)
    rig.device.bytes.zero_()
    back = [(23, 5), (22, 6), (3, 7), (4, 0), (5, 20), (6, 21), (13, 3), (14, 2)]
    checksums = dict(zip((host for _, host in away), out.checksums, strict=True))
    into = rig.run(IN, moves(back, checksums))
    assert into.problems == ("",) * len(back)
    assert into.checksums == tuple(checksums[host] for _, host in back)
    for device, host in back:
        assert (rig.page(device) == content[host]).all()
    assert int(rig.device.bytes[[0, 1, 2, 7, 8]].sum()) == 0
    assert rig.swap.in_flight == 0


def test_a_page_that_leaves_is_read_after_the_computation_that_was_queued(rig):
    rig.computation.add(lambda: rig.device.bytes[3].fill_(7))
    done = rig.run(OUT, moves([(3, 1)]))
    assert done.problems == ("",)
    assert (rig.backing.pages[1] == 7).all()


def test_a_page_that_comes_replaces_the_old_one_after_the_computation_that_was_queued(rig):
    """The step may still read what was there: bookkeeping runs ahead of the device."""
    rig.backing.pages[1] = 9
    seen, old = [], rig.page(3)
    rig.computation.add(lambda: seen.append(rig.page(3)))
    done = rig.run(IN, moves([(3, 1)], {1: xxhash.xxh3_64_intdigest(rig.backing.pages[1])}))
    assert done.problems == ("",)
    assert (seen[0] == old).all()
    assert (rig.page(3) == 9).all()


def test_the_order_of_events_on_the_way_out():
    """Nothing is copied before the lane waits for the computation, nothing written before its copy ended, nothing completed before
    all is written; and the copy of the next run is under way while one is written."""
    rig = Rig()
    rig.run(OUT, moves([(0, 0), (1, 1), (4, 4), (8, 8), (12, 12)]))
    rig.swap.close()
    kinds = [(event[0], *event[-1:]) for event in rig.log.of("after", "copy", "waited", "write", "completed")]
    assert [kind[0] for kind in kinds] == [
        "after", "copy", "copy", "waited", "write", "copy", "waited", "write", "copy", "waited", "write", "waited", "write",
        "completed",
    ]  # fmt: skip
    assert [event[2:] for event in rig.log.of("copy")] == [(0, 0, 2), (1, 4, 1), (0, 8, 1), (1, 12, 1)]
    assert [event[1] for event in rig.log.of("write")] == [0, 4, 8, 12]


def test_the_order_of_events_on_the_way_in():
    """Nothing is copied before the lane waits for the computation or before it is read, no buffer is read into while it drains,
    nothing is completed before the last copy ended; and the step joins it before it hears of it."""
    rig = Rig()
    pairs = [(0, 0), (1, 1), (4, 4), (8, 8), (12, 12)]
    sums = {host: xxhash.xxh3_64_intdigest(rig.backing.pages[host]) for _, host in pairs}
    assert rig.run(IN, moves(pairs, sums)).problems == ("",) * 5
    rig.swap.close()
    assert [event[0] for event in rig.log.of("after", "copy", "waited", "read", "completed", "join")] == [
        "after", "read", "copy", "read", "copy", "waited", "read", "copy", "waited", "read", "copy", "waited", "completed", "join",
    ]  # fmt: skip
    assert rig.log.of("join") == [("join", 5)]  # the wait for the computation and four copies
    assert [event[2:] for event in rig.log.of("copy")] == [(0, 0, 2), (1, 4, 1), (0, 8, 1), (1, 12, 1)]


def test_a_page_that_does_not_verify_is_not_copied(rig):
    pairs = [(device, device) for device in range(2, 9)]
    sums = dict(zip(range(2, 9), rig.run(OUT, moves(pairs)).checksums, strict=True))
    rig.backing.pages[5, 10] ^= 1
    rig.device.bytes.zero_()
    done = rig.run(IN, moves(pairs, sums))
    assert [problem for problem in done.problems if problem] == ["checksum differs"]
    assert done.problems[3] == "checksum differs"
    assert int(rig.device.bytes[5].sum()) == 0
    assert all((rig.device.bytes[page].numpy() == rig.backing.pages[page]).all() for page in (2, 3, 4, 6, 7, 8))
    assert [event[3:] for event in rig.log.of("copy")[1:]] == [(2, 3), (6, 3)]


def test_a_transfer_of_which_nothing_verifies_copies_nothing(rig):
    done = rig.run(IN, moves([(1, 1), (2, 2)], {1: 1, 2: 2}))
    assert done.problems == ("checksum differs",) * 2
    assert rig.log.of("copy", "join") == []


@pytest.mark.parametrize("way", Direction)
def test_a_page_whose_backing_fails_is_a_problem_of_its_run_alone(rig, way):
    pairs = [(0, 0), (1, 1), (6, 6), (9, 9)]
    sums = dict(zip([0, 1, 6, 9], rig.run(OUT, moves(pairs)).checksums, strict=True))
    rig.backing.failing = {1}
    done = rig.run(way, moves(pairs, sums))
    assert done.problems == ("page 0 fails", "page 0 fails", "", "")
    rig.backing.failing = set()
    assert rig.run(way, moves(pairs, sums)).problems == ("",) * 4


@pytest.mark.parametrize("way", Direction)
@pytest.mark.parametrize("verb", ["mark", "after", "copy", "join"])
def test_a_device_that_fails_is_a_problem_and_not_an_exception(rig, way, verb):
    pairs = [(0, 0), (4, 4)]
    sums = dict(zip([0, 4], rig.run(OUT, moves(pairs)).checksums, strict=True))
    rig.lanes[way].fail = verb
    done = rig.run(way, moves(pairs, sums))
    expected = "" if (way, verb) == (OUT, "join") else f"CUDA error in {verb}"
    assert done.problems == (expected,) * 2
    if verb == "copy":  # what was begun is over before its pages and buffers are used again
        assert rig.log.of("drain") == [("drain", way)]
    rig.lanes[way].fail = None
    assert rig.run(way, moves(pairs, sums)).problems == ("",) * 2


def test_pages_that_must_outlive_the_process_reach_the_disk():
    rig = Rig(sync=True)
    rig.run(OUT, moves([(0, 3), (5, 4)]))
    assert rig.log.of("sync") == []
    assert rig.run(OUT, moves([(0, 3), (5, 4)]), durable=True).problems == ("", "")
    assert rig.log.of("write", "sync")[-3:] == [("write", 3), ("write", 4), ("sync", 3, 4)]
    rig.backing.sync_fails = True
    assert rig.run(OUT, moves([(0, 3), (5, 4)]), durable=True).problems == ("no sync", "no sync")
    rig.swap.close()


def test_points_are_reached_and_a_dead_thread_is_told():
    points, deaths = [], []
    rig = Rig(reached=points.append, on_death=deaths.append)
    rig.run(OUT, moves([(0, 0)]))
    rig.run(IN, moves([(1, 0)]))
    assert points == ["swap.before_out", "swap.after_out", "swap.before_in", "swap.after_in"]
    rig.backing.death = KeyError("a bug")
    rig.swap.submit(Transfer(OUT, tuple(moves([(0, 0)]))))
    rig.swap.close()
    assert repr(deaths[0]) == "KeyError('a bug')"
    assert rig.swap.in_flight == 1


def test_closing_finishes_what_was_submitted():
    rig = Rig()
    for page in range(10):
        rig.swap.submit(Transfer(OUT, tuple(moves([(page, page)]))))
    rig.swap.close()
    assert len(rig.swap.completed()) == 10
    assert (rig.backing.pages[:10] == rig.device.bytes[:10].numpy()).all()


@pytest.mark.parametrize("lane_class", [LateLane, EarlyLane])
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_in_both_directions_at_once(lane_class, seed):
    """Disjoint transfers in flight together, runs of all lengths: every page is where the last completion says."""
    rng, rig = np.random.default_rng(seed), Rig(lane_class)
    for _ in range(25):
        devices, hosts = rng.permutation(PAGES), rng.permutation(PAGES)
        if rng.integers(2):
            devices[:12], hosts[:12] = np.sort(devices[:12]), np.sort(hosts[:12])
        away = moves(zip(devices[:6].tolist(), hosts[:6].tolist(), strict=True))
        back = [
            PageMove(int(device), int(host), xxhash.xxh3_64_intdigest(rig.backing.pages[host]))
            for device, host in zip(devices[6:12], hosts[6:12], strict=True)
        ]
        left = {move.host_page: rig.page(move.device_page) for move in away}
        came = {move.device_page: rig.backing.pages[move.host_page].copy() for move in back}
        rig.swap.submit(Transfer(OUT, tuple(away)))
        rig.swap.submit(Transfer(IN, tuple(back)))
        while rig.swap.in_flight:
            assert all(done.problems == ("",) * 6 for done in rig.swap.completed(wait=10))
        assert all((rig.backing.pages[host] == content).all() for host, content in left.items())
        assert all((rig.page(device) == content).all() for device, content in came.items())
    rig.swap.close()


def test_a_pool_in_plain_memory_has_threads_alone():
    device = DevicePool(2, GEOMETRY)
    swap = make_swap(device, HostPool(2, GEOMETRY, MemoryBacking(2, GEOMETRY.page_bytes)))
    assert isinstance(swap, ThreadSwap)
    swap.close()
