"""The order of durable writes: no entry names a page that is being written, no page is used while an entry names it."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.eviction import make_policy
from engine.host_cache import ENTRY, HostCache, HostState
from engine.page_manager import PageManager
from tests.profiles import examples

TOTAL = 6


RETENTION = 100.0


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def host_cache(table=None, *, durable=True, reserve=0, policy="lru", clock=None):
    policy = make_policy(policy, TOTAL)
    cache = HostCache(PageManager(TOTAL), policy, durable=durable, reserve=reserve, clock=clock or Clock())
    cache.adopt(table or {})
    return cache


def test_a_table_read_at_start_is_what_the_pool_holds():
    cache = host_cache({1: ("a", 11), 4: ("b", 44)})
    assert cache.manager.used_count == 2
    assert (cache.find("a").page, cache.find("a").checksum, cache.find("b").page) == (1, 11, 4)
    assert cache.drops == []


def test_a_start_does_not_make_old_pages_young():
    """An engine that was started more often than the retention time kept what was in its table for ever."""
    cache = HostCache(PageManager(TOTAL), make_policy("lru", TOTAL), durable=True, clock=Clock())
    cache.adopt({1: ("young", 1), 2: ("old", 2), 3: ("older", 3)}, {1: RETENTION - 1, 2: RETENTION, 3: RETENTION + 1})
    assert cache.problems() == []
    free = cache.begin_erase(RETENTION, TOTAL)
    assert not {1, 2, 3} & set(free), "entries first"
    assert sorted(cache.drops) == [2, 3]
    assert cache.find("young") is not None


def test_entries_of_a_smaller_pool_and_doubles_are_dropped_first():
    cache = host_cache({1: ("a", 1), 2: ("a", 1), 9: ("b", 1)})
    assert sorted(cache.drops) == [2, 9]
    assert cache.find("b") is None


def test_without_a_durable_table_an_evicted_page_is_free_at_once():
    cache = host_cache(durable=False, reserve=1)
    for identity in "abcdef":
        cache.complete_store(cache.prepare_store(identity, "s"), 1)
    cache.release("s")
    cache.hold(cache.find("a"), "t")
    cache.make_room()
    assert cache.free_count == 1
    assert cache.find("a")
    assert (cache.ready, cache.drops) == ([], [])


def test_a_private_page_goes_with_its_sequence_even_in_mid_copy():
    cache = host_cache()
    page = cache.prepare_store("", "s")
    cache.release("s")
    assert cache.free_count == TOTAL - 1  # still pinned by the copy
    cache.complete_store(page, 5)
    assert cache.free_count == TOTAL
    assert cache.ready == []
    assert cache.problems() == []


def fill(cache, identity, holder="s"):
    page = cache.prepare_store(identity, holder)
    cache.complete_store(page, 1)
    cache.published(identity)
    cache.release(holder)
    return page


def erase(cache, limit=TOTAL):
    """One round: the pages that are zeros now."""
    pages = cache.begin_erase(RETENTION, limit)
    for page in pages:
        cache.complete_erase(page, ok=True)
    return pages


def test_a_page_that_nobody_used_is_given_up_and_zeroed_after_the_stores_answer():
    clock = Clock()
    cache = host_cache(clock=clock)
    assert erase(cache) == list(range(TOTAL))  # what an earlier life left there is unknown
    page = fill(cache, "a")
    clock.now = RETENTION - 1
    assert (erase(cache), cache.drops) == ([], [])
    clock.now = RETENTION
    assert (erase(cache), cache.drops, cache.find("a")) == ([], [page.page], None)
    clock.now = 10 * RETENTION
    assert erase(cache) == []  # the store has not answered: its entry may still name the page
    cache.dropped(page.page)
    assert erase(cache) == [page.page]
    assert erase(cache) == []
    assert cache.problems() == []


def test_every_use_counts_and_nothing_in_use_goes():
    clock = Clock()
    cache = host_cache(clock=clock)
    erase(cache)
    found, loaded, held = (fill(cache, identity) for identity in "abc")
    cache.hold(held, "t")
    clock.now = RETENTION - 1
    cache.hold(found, "u")
    cache.release("u")
    cache.prepare_load(loaded)
    clock.now += RETENTION
    assert (erase(cache), cache.drops) == ([], [found.page])
    clock.now += 10
    cache.complete_load(loaded, ok=True)
    cache.release("t")
    clock.now += RETENTION - 1
    assert (erase(cache), cache.drops) == ([], [found.page])
    clock.now += 1
    erase(cache)
    assert cache.drops == [found.page, loaded.page, held.page]


def test_a_private_page_and_a_failed_copy_are_zeroed_though_no_entry_named_them():
    clock = Clock()
    cache = host_cache(clock=clock)
    erase(cache)
    private, failed = cache.prepare_store("", "s"), cache.prepare_store("a", "s")
    cache.complete_store(private, 1)
    cache.complete_store(failed, None)
    cache.release("s")
    assert cache.free_count == TOTAL
    clock.now = RETENTION
    assert sorted(erase(cache)) == [private.page, failed.page]


def test_a_failed_copy_does_not_take_the_page_with_it_that_has_its_bits_now():
    clock = Clock()
    cache = host_cache(clock=clock)
    erase(cache)
    failed = cache.prepare_store("a", "s")
    cache.complete_store(failed, None)
    cache.complete_store(cache.prepare_store("a", "t"), 1)
    cache.published("a")
    cache.release("t")
    clock.now = RETENTION - 1
    cache.hold(cache.find("a"), "u")
    cache.release("u")
    clock.now = RETENTION
    assert (erase(cache), cache.drops) == ([], [])
    assert cache.find("a").readable


def test_a_page_that_cannot_be_zeroed_is_tried_again():
    clock = Clock()
    cache = host_cache(clock=clock)
    (page,) = cache.begin_erase(RETENTION, 1)
    cache.complete_erase(page, ok=False)
    assert erase(cache) == [other for other in range(TOTAL) if other != page]
    clock.now = RETENTION
    assert erase(cache) == [page]


def test_what_is_being_zeroed_is_not_made_room_for():
    cache = host_cache(reserve=2, clock=Clock())
    for identity in "abcd":
        fill(cache, identity)
    assert len(cache.begin_erase(RETENTION, 1)) == 1
    cache.make_room()
    assert (cache.free_count, cache.num_evictions) == (1, 0)


class Lifecycle(RuleBasedStateMachine):
    """Random life of host pages against the durable table as the store would have it, and against the bytes in the pool."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.cache = host_cache(policy="arc", clock=self.clock)
        self.bytes = dict.fromkeys(range(TOTAL), "of an earlier life")  # without the pages that are zeros
        self.erasing = []
        self.table = {}  # durable: page -> identity
        self.pages = []  # every page ever prepared
        self.pipelines = []  # (publish, drop) on their way to the store

    @rule(identity=st.sampled_from("abcdefghij") | st.just(""), sequence=st.sampled_from(["s1", "s2"]))
    def store(self, identity, sequence):
        page = self.cache.find(identity)
        if page is not None:
            self.cache.hold(page, sequence)
            return
        page = self.cache.prepare_store(identity, sequence)
        if page is None:
            assert self.cache.free_count == 0
            return
        assert page.page not in self.table, "a page that an entry names is about to be written"
        assert page.page not in self.erasing, "a page is about to be written that a thread will zero"
        self.bytes[page.page] = page
        self.pages.append(page)

    def _some(self, *states):
        return [page for page in self.pages if page.state in states]

    @precondition(lambda self: self._some(HostState.FILLING))
    @rule(ok=st.booleans(), data=st.data())
    def complete(self, ok, data):
        self.cache.complete_store(data.draw(st.sampled_from(self._some(HostState.FILLING))), 7 if ok else None)

    @precondition(lambda self: self._some(HostState.PUBLISHED, HostState.FILLED))
    @rule(ok=st.booleans(), data=st.data())
    def load(self, ok, data):
        page = data.draw(st.sampled_from(self._some(HostState.PUBLISHED, HostState.FILLED)))
        if self.cache.manager.holders(page.page):
            self.cache.prepare_load(page)
            self.cache.complete_load(page, ok=ok)

    @rule()
    def send(self):
        self.pipelines.append(([(page.page, page.identity) for page in self.cache.ready], self.cache.drops))
        self.cache.ready, self.cache.drops = [], []

    @precondition(lambda self: self.pipelines)
    @rule()
    def answer(self):
        publish, drops = self.pipelines.pop(0)
        for number, identity in publish:
            self.table[number] = identity
            self.cache.published(identity)
        for number in drops:
            self.table.pop(number, None)
            self.cache.dropped(number)

    @rule(seconds=st.sampled_from([1, RETENTION / 2, RETENTION]))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule(limit=st.integers(1, TOTAL))
    def begin_erase(self, limit):
        pages = self.cache.begin_erase(RETENTION, limit)
        assert len(pages) <= limit
        for page in pages:
            assert page not in self.table, "a page that an entry names is about to be zeroed"
        self.erasing += pages

    @precondition(lambda self: self.erasing)
    @rule(ok=st.booleans())
    def complete_erase(self, ok):
        page = self.erasing.pop()
        if ok:
            del self.bytes[page]
        self.cache.complete_erase(page, ok=ok)

    def teardown(self):
        """Once nobody uses anything, nothing is left."""
        for page in self._some(HostState.FILLING):
            self.cache.complete_store(page, 7)
        for sequence in ("s1", "s2"):
            self.cache.release(sequence)
        for _ in range(3):
            self.send()
            while self.pipelines:
                self.answer()
            self.clock.now += RETENTION
            self.begin_erase(TOTAL)
            while self.erasing:
                self.complete_erase(ok=True)
        assert (self.table, self.bytes, self.cache.free_count) == ({}, {}, TOTAL)

    @rule(count=st.integers(1, 3))
    def evict(self, count):
        before = {page.page: self.cache.manager.holders(page.page) for page in self._some(HostState.PUBLISHED)}
        self.cache._reserve = self.cache.free_count + len(self._some(HostState.DROPPING)) + len(self.erasing) + count
        self.cache.make_room()
        for page in self._some(HostState.DROPPING):
            assert before.get(page.page, (ENTRY,)) == (ENTRY,), "a page that backs a running Sequence was evicted"

    @rule(sequence=st.sampled_from(["s1", "s2"]))
    def leave(self, sequence):
        self.cache.release(sequence)
        assert self.cache.manager.held_by(sequence) == []

    @invariant()
    def consistent(self):
        assert self.cache.problems() == []
        for number, identity in self.table.items():
            named = [p for p in self._some(HostState.PUBLISHED, HostState.DROPPING) if p.page == number]
            assert identity in {page.identity for page in named} or number in {n for _, drops in self.pipelines for n in drops}


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(max_examples=examples(150), stateful_step_count=40)
