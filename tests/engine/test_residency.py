"""Manager, pools, swap, caches and crash together, driven by hypothesis against a dictionary.

There is no model here: a row's "KV" is a number that its tenant, its tokens and the shape of its call determine, as the identity of
its page promises. So every page, wherever it is, can be compared with what it should hold, and no tenant reads another's.
"""

import zlib
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import settings, target
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache import PagedKVCache
from engine.copies import Copies
from engine.eviction import make_policy
from engine.geometry import PageGeometry
from engine.host_cache import HostCache, HostState
from engine.identity import GENERATED, page_identities
from engine.pools import DevicePool, HostPool
from engine.residency import Failed, Residency
from engine.sampler import SamplingParams
from engine.scheduler import needs_chunk, next_chunk
from engine.sequence import Request, Sequence
from engine.swap import Completed, Direction, verify
from recovery.checkpointer import Checkpointer
from tests.profiles import examples
from tests.rigs import CheckedMemory

DEVICE, HOST, PAGE_SIZE, CHUNK, MAX_TOKENS = 8, 10, 2, 4, 7
GEOMETRY = PageGeometry(1, PAGE_SIZE, 1, 1, "float32")
ODD = np.float32(0.5)
HEADS, TENANTS = [(), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8)], ["00", "11"]


class SwapByHand:
    """A swap engine whose copies happen when, in the order and with the failures that the test wants."""

    def __init__(self, device, host):
        self.device_bytes, self.backing = device.bytes.numpy(), host.backing
        self.waiting, self.done = [], deque()

    @property
    def in_flight(self):
        return len(self.waiting) + len(self.done)

    def submit(self, transfer):
        self.waiting.append(transfer)

    def copy(self, index, bad=None):
        """Move the bytes now. ``bad``: the position of a page whose copy fails."""
        transfer = self.waiting.pop(index)
        checksums, problems = [], []
        for position, move in enumerate(transfer.moves):
            data = self.device_bytes[move.device_page]
            if position == bad:
                (data if transfer.direction is Direction.IN else self.backing.pages[move.host_page])[:] = 0xAB  # torn
                checksums.append(0)
            elif transfer.direction is Direction.OUT:
                checksums += self.backing.write_pages(move.host_page, data)
            else:
                checksums += self.backing.read_pages(move.host_page, data)
            problems.append("cannot" if position == bad else "")
        if transfer.direction is Direction.IN:
            problems = verify(transfer.moves, checksums, problems)
        self.done.append(Completed(transfer, tuple(checksums), tuple(problems), 0.001))

    def completed(self, wait=0.0):
        done, self.done = list(self.done), deque()
        return done

    def close(self):
        pass


def value_of(sequence, row):
    """The "key" of a row; its "value" is the negative."""
    start = row - row % CHUNK
    shape = GENERATED if row >= sequence.num_prompt else min(CHUNK, sequence.num_prompt - start)
    made_of = (sequence.request.root, sequence.tokens[: row + 1], shape)
    return np.float32(zlib.crc32(repr(made_of).encode()) % 100_000)


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.backing = CheckedMemory(HOST, GEOMETRY.page_bytes)
        self.table = {}  # durable: host page -> entry
        self.pipelines = []  # on their way to the store
        self.expected = {}  # identity -> bytes
        self.count = self.pressure = 0
        self.start({})

    def start(self, tokens_of):
        """A new life of the engine on what is durable; ``tokens_of``: sequence id -> (request, committed tokens)."""
        device = DevicePool(DEVICE, GEOMETRY)
        host = HostPool(HOST, GEOMETRY, self.backing)
        self.swap = SwapByHand(device, host)
        policy = ("arc", "lru", "fifo")[self.count % 3]
        cache = HostCache(host.manager, make_policy(policy, HOST), durable=True, reserve=2)
        copies = Copies(device.manager, cache, host, self.swap)
        self.residency = Residency(PagedKVCache(device, host), make_policy(policy, DEVICE), prefill_chunk=CHUNK, copies=copies)
        self.checkpointer = Checkpointer(cache)
        self.checkpointer.adopt(self.table)
        self.pipelines = []
        self.waiting, self.arriving, self.running = [], [], []
        for request, tokens in tokens_of.values():
            sequence = Sequence(request)
            sequence.tokens = list(tokens)
            self.waiting.append(sequence)

    @property
    def everybody(self):
        return [*self.waiting, *self.arriving, *self.running]

    @initialize(heads=st.lists(st.integers(0, 2), min_size=3, max_size=5))
    def begin(self, heads):
        for head in heads:
            self.submit(HEADS[head], [1], TENANTS[0], True)

    # --- Sequences ----------------------------------------------------------------------------------------------------

    @rule(
        head=st.sampled_from(HEADS),
        tail=st.lists(st.integers(1, 2), min_size=1, max_size=3),
        tenant=st.sampled_from([TENANTS[0], *TENANTS]),
        publishes=st.sampled_from([True, True, True, False]),
    )
    def submit(self, head, tail, tenant, publishes):
        if len(self.everybody) < 6:
            self.count += 1
            params = SamplingParams(temperature=0.0, seed=0)
            request = Request(f"s{self.count}", (*head, *tail), params, MAX_TOKENS, root=tenant, publishes=publishes)
            self.waiting.append(Sequence(request))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data):
        sequence = data.draw(st.sampled_from(self.waiting))
        sources = self.residency.locate(sequence)
        if sources is None:
            assert self.swap.in_flight
            return
        if self.residency.awaits_another(sequence, sources):
            assert self.arriving or self.running
            return
        if self.residency.admission_cost(sequence, sources) > self.residency.available:
            free = self.residency.cache.gpu_manager.free_count
            with pytest.raises(MemoryError):
                self.residency.admit(sequence, sources)
            assert free == self.residency.cache.gpu_manager.free_count
            return
        self._admit(sequence, sources)

    def _admit(self, sequence, sources):
        self.waiting.remove(sequence)
        arrived = self.residency.admit(sequence, sources)
        (self.arriving if arrived is None else self.running).append(sequence)

    @rule()
    def admit_all(self):
        for sequence in list(self.waiting):
            sources = self.residency.locate(sequence)
            if sources is None or self.residency.awaits_another(sequence, sources):
                continue
            if self.residency.admission_cost(sequence, sources) <= self.residency.available:
                self._admit(sequence, sources)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), steps=st.integers(1, 4), token=st.integers(1, 2))
    def compute(self, data, steps, token):
        sequence = data.draw(st.sampled_from(self.running))
        for _ in range(steps):
            if sequence in self.running and self.residency.growth(sequence) <= self.residency.available:
                self._compute(sequence, token)
        self.residency.flush()

    @precondition(lambda self: self.running)
    @rule(token=st.integers(1, 2))
    def compute_all(self, token):
        for sequence in list(self.running):
            if self.residency.growth(sequence) <= self.residency.available:
                self._compute(sequence, token)
        self.residency.flush()

    def _compute(self, sequence, token):
        residency = self.residency
        residency.grow(sequence)
        start, end = next_chunk(sequence, CHUNK) if needs_chunk(sequence) else (sequence.num_stored, sequence.num_stored + 1)
        first = max(start, sequence.num_stored)
        rows = [value_of(sequence, row) + self._strange(sequence) for row in range(first, end)]
        if rows:
            keys = torch.tensor(rows).reshape(-1, 1, 1)
            residency.cache.scatter(sequence.id, 0, first, keys, -keys)
        residency.stored(sequence, end)
        if end == len(sequence.tokens):
            for twin in [s for s in self.waiting if self._is_twin(s, sequence)]:
                if residency.available > 2:
                    residency.fork(sequence, twin)
                    self.waiting.remove(twin)
                    self.running.append(twin)
                    twin.tokens.append(3)
            sequence.tokens.append(token)
        if sequence.num_generated >= MAX_TOKENS:
            self._learn(sequence)
            self._release(sequence)

    @staticmethod
    def _strange(sequence):
        """A Sequence that began under another arithmetic computes other bits, and nobody else may ever find them."""
        return 0 if sequence.request.publishes else ODD

    @staticmethod
    def _is_twin(other, sequence):
        return (
            other.request.prompt_ids == sequence.request.prompt_ids
            and (other.request.root, other.request.publishes) == (sequence.request.root, sequence.request.publishes)
            and not other.num_generated
            and other.swapped is None
            and not sequence.num_generated
        )

    @precondition(lambda self: self.running)
    @rule()
    def preempt_all_but_one(self):
        for sequence in self.running[1:]:
            if self.residency.swap_out(sequence):
                self.running.remove(sequence)
                self.waiting.append(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["swap", "swap", "drop"]))
    def preempt(self, data, how):
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        stored = sequence.num_stored
        if how == "drop" or not self.residency.swap_out(sequence):
            self.residency.drop(sequence)
            stored = 0
        assert sequence.num_stored == stored
        self.waiting.append(sequence)

    @precondition(lambda self: self.arriving)
    @rule(data=st.data())
    def abandon(self, data):
        sequence = data.draw(st.sampled_from(self.arriving))
        self.arriving.remove(sequence)
        self.residency.abandon(sequence)
        self.waiting.append(sequence)

    @precondition(lambda self: self.everybody)
    @rule(data=st.data())
    def abort(self, data):
        """In whatever state it is, with whatever copies in flight."""
        self._release(data.draw(st.sampled_from(self.everybody)))

    def _release(self, sequence):
        for place in (self.waiting, self.arriving, self.running):
            if sequence in place:
                place.remove(sequence)
        self.residency.release(sequence)

    # --- copies, the store, the world ---------------------------------------------------------------------------------

    @precondition(lambda self: self.swap.waiting)
    @rule(data=st.data(), fails=st.integers(0, 5))
    def copy(self, data, fails):
        index = data.draw(st.integers(0, len(self.swap.waiting) - 1))
        moves = self.swap.waiting[index].moves
        self.swap.copy(index, data.draw(st.integers(0, len(moves) - 1)) if fails == 0 else None)

    @rule()
    def copy_all(self):
        while self.swap.waiting:
            self.swap.copy(0)
        self.collect()

    @rule()
    def collect(self):
        for arrival in self.residency.collect():
            self.arriving.remove(arrival.sequence)
            (self.waiting if isinstance(arrival, Failed) else self.running).append(arrival.sequence)

    @precondition(lambda self: self.checkpointer.has_writes)
    @rule()
    def send(self):
        self.pipelines.append(self.checkpointer.take_writes())

    @precondition(lambda self: self.pipelines)
    @rule()
    def answer(self):
        publish, drop = self.pipelines.pop(0)
        self._write(publish, drop)
        self.checkpointer.written(publish, drop)

    @rule()
    def exchange(self):
        self.pipelines.append(self.checkpointer.take_writes())
        while self.pipelines:
            self.answer()

    def _write(self, publish, drop):
        self.table |= publish
        for page in drop:
            self.table.pop(page, None)

    @precondition(lambda self: self.table)
    @rule(data=st.data())
    def flip_a_bit_and_crash(self, data):
        self.backing.pages[data.draw(st.sampled_from(sorted(self.table))), 3] ^= 64
        self.crash(0, 0)

    @rule(sent=st.integers(0, 3), luck=st.integers(0, 4))
    def crash(self, sent, luck):
        """Everything in memory is gone; of what was sent to the store the first few arrived; copies in flight are torn."""
        if luck:  # a life that is too short does little
            return
        for publish, drop in self.pipelines[:sent]:
            self._write(publish, drop)
        for transfer in self.swap.waiting:
            if transfer.direction is Direction.OUT:
                for move in transfer.moves:
                    assert move.host_page not in self.table, "a page that an entry names was being written"
                    self.backing.pages[move.host_page] = 0xCD
        self.start({s.id: (s.request, s.tokens) for s in self.everybody})

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def the_books_are_consistent(self):
        assert self.residency.problems() == []
        present = {s.id for s in (*self.arriving, *self.running)}
        assert self.residency.cache.page_tables.keys() == present

    @invariant()
    def every_page_holds_what_it_should(self):
        cache = self.residency.cache
        for sequence in self.everybody:
            self._learn(sequence)
        for sequence in self.running:
            keys, values = cache.gather(sequence.id, 0, sequence.num_stored)
            wanted = [value_of(sequence, row) for row in range(sequence.num_stored)]
            found = keys.flatten().tolist()
            if sequence.request.publishes:
                assert found == wanted
            else:
                assert all(value in (right, right + ODD) for value, right in zip(found, wanted, strict=True))
            assert values.flatten().tolist() == [-value for value in found]
        for identity, page in self.residency.prefix._pages.items():
            assert cache.device.bytes[page].numpy().tobytes() == self.expected[identity]

    def _learn(self, sequence):
        root, tokens = sequence.request.root, sequence.tokens
        full = page_identities(root, tokens, sequence.num_prompt, page_size=PAGE_SIZE, prefill_chunk=CHUNK)
        for index, identity in enumerate(full):
            if identity not in self.expected:
                rows = range(index * PAGE_SIZE, (index + 1) * PAGE_SIZE)
                keys = np.array([value_of(sequence, row) for row in rows], np.float32)
                self.expected[identity] = np.stack([keys, -keys]).tobytes()

    @invariant()
    def pages_run_out(self):
        """Hypothesis looks for programs that leave the pools as few pages as possible."""
        self.pressure = max(self.pressure, DEVICE - self.residency.available + HOST - self.residency.host.free_count)

    @invariant()
    def every_entry_names_a_page_that_was_complete(self):
        for page in self.residency.host._by_identity.values():
            assert page.state is not HostState.FILLING or page.page not in self.table

    def teardown(self):
        """When all have left and every copy came back, every device page can be had again and the host holds cached pages only."""
        target(float(self.pressure), label="pages in use")
        for sequence in self.everybody:
            self._release(sequence)
        while self.swap.waiting:
            self.swap.copy(0)
        self.residency.collect()
        self.the_books_are_consistent()
        assert self.residency.available == DEVICE
        self.exchange()
        host = self.residency.host
        assert host.manager.used_count == len(host)
        assert self.table.keys() == {page.page for page in host._by_identity.values()}


TestResidency = Machine.TestCase
TestResidency.settings = settings(max_examples=examples(2000), stateful_step_count=50)
TestResidency.pytestmark = [pytest.mark.timeout(900)]


# --- abort, in each state a copy can be in -------------------------------------------------------------------------------


class Books:
    """One Sequence on an empty pool, with copies that wait for the test."""

    def __init__(self, table=None, backing=None):
        self.device = DevicePool(DEVICE, GEOMETRY)
        self.backing = backing or CheckedMemory(HOST, GEOMETRY.page_bytes)
        pool = HostPool(HOST, GEOMETRY, self.backing)
        self.swap = SwapByHand(self.device, pool)
        self.host = HostCache(pool.manager, make_policy("arc", HOST), durable=True)
        self.host.adopt(table or {})
        copies = Copies(self.device.manager, self.host, pool, self.swap)
        self.residency = Residency(PagedKVCache(self.device, pool), make_policy("arc", DEVICE), prefill_chunk=CHUNK, copies=copies)
        self.sequence = Sequence(Request("s", (1, 2, 3, 4, 5), SamplingParams(temperature=0.0, seed=0), 9, root="00"))

    def admit(self):
        return self.residency.admit(self.sequence, self.residency.locate(self.sequence))

    def compute(self):
        self.residency.stored(self.sequence, 5)  # two sealed pages, one row in the tail
        self.sequence.tokens.append(6)
        self.residency.flush()

    def copy(self, bad=None):
        self.swap.copy(0, bad)
        return self.residency.collect()


def checkpoint_in_flight():
    books = Books()
    books.admit()
    books.compute()
    return books


def swap_out_in_flight():
    books = checkpoint_in_flight()
    assert books.residency.swap_out(books.sequence)
    assert len(books.swap.waiting) == 2
    return books


def swap_out_failed():
    books = swap_out_in_flight()
    books.copy()
    books.copy(bad=0)
    return books


def swapped_out():
    books = swap_out_in_flight()
    books.copy()
    books.copy()
    return books


def swap_in_in_flight():
    books = swapped_out()
    while books.residency.prefix.evict():
        pass
    assert books.admit() is None
    return books


def swap_in_with_a_bad_page_in_flight():
    books = swap_in_in_flight()
    books.backing.pages[books.sequence.swapped[0].page] ^= 1
    return books


def swap_in_failed():
    books = swap_in_with_a_bad_page_in_flight()
    assert [type(arrival) for arrival in books.copy()] == [Failed]
    return books


def swapped_in():
    books = swap_in_in_flight()
    assert books.copy()[0].found == 3
    return books


def restore_in_flight():
    first = checkpoint_in_flight()
    first.copy()
    table = {page.page: (page.identity, page.checksum) for page in first.host.ready}
    books = Books(table, first.backing)
    assert books.admit() is None
    return books


@pytest.mark.parametrize(
    "state",
    [
        checkpoint_in_flight,
        swap_out_in_flight,
        swap_out_failed,
        swapped_out,
        swap_in_in_flight,
        swap_in_with_a_bad_page_in_flight,
        swap_in_failed,
        swapped_in,
        restore_in_flight,
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_an_abort_leaves_the_free_counts_exact(state, fails):
    books = state()
    pinned = {move.device_page for transfer in books.swap.waiting for move in transfer.moves}
    pinned_host = {move.host_page for transfer in books.swap.waiting for move in transfer.moves}
    books.residency.release(books.sequence)
    assert books.residency.problems() == []
    assert books.residency.available == DEVICE - len(pinned)
    assert books.host.manager.used_count == len(books.host) + len(
        pinned_host - {p.page for p in books.host._by_identity.values()}
    ) + len(books.host._dropping)
    while books.swap.waiting:
        assert books.copy(bad=0 if fails else None) == []
    assert books.residency.problems() == []
    assert books.residency.available == DEVICE
    assert books.device.manager.free_count == DEVICE - len(books.residency.prefix)
    assert books.host.manager.used_count == len(books.host) + len(books.host._dropping)


def test_a_swapped_sequence_comes_back_with_every_row():
    books = swapped_in()
    assert (books.sequence.num_stored, books.sequence.num_sealed, books.sequence.swapped) == (5, 2, None)
    assert books.host.manager.used_count == 2  # its tail has left the host again


def test_what_did_not_verify_is_computed_and_the_rest_is_kept():
    books = swap_in_failed()
    books.residency.admit(books.sequence, books.residency.locate(books.sequence))
    assert books.sequence.num_stored == 0  # the first page is gone, and what is behind it is of no use
    assert books.residency.stats.verify_failures == 1
    assert books.host.drops
