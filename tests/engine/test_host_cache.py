"""The order of durable writes: no entry names a page that is being written, no page is used while an entry names it."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.eviction import make_policy
from engine.host_cache import ENTRY, HostCache, HostState
from engine.page_manager import PageManager

TOTAL = 6


def host_cache(table=None, *, durable=True, reserve=0, policy="lru"):
    return HostCache(PageManager(TOTAL), make_policy(policy, TOTAL), table, durable=durable, reserve=reserve)


def test_a_table_read_at_start_is_what_the_pool_holds():
    cache = host_cache({1: ("a", 11), 4: ("b", 44)})
    assert cache.manager.used_count == 2
    assert (cache.find("a").page, cache.find("a").checksum, cache.find("b").page) == (1, 11, 4)
    assert cache.drops == []


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


class Lifecycle(RuleBasedStateMachine):
    """Random life of host pages against the durable table as the store would have it."""

    def __init__(self):
        super().__init__()
        self.cache = host_cache(policy="arc")
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

    @rule(count=st.integers(1, 3))
    def evict(self, count):
        before = {page.page: self.cache.manager.holders(page.page) for page in self._some(HostState.PUBLISHED)}
        self.cache._reserve = self.cache.free_count + len(self._some(HostState.DROPPING)) + count
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
TestLifecycle.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
