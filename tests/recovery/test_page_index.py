"""The order of durable writes: no entry names a page that is being written, no page is used while an entry names it."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.page_manager import PageManager
from recovery.page_index import PageIndex, PageState
from storage.records import PageEntry

TOTAL = 6


def test_a_table_read_at_start_is_what_the_pool_holds():
    manager = PageManager(TOTAL)
    index = PageIndex(manager, {1: PageEntry("a", 11), 4: PageEntry("b", 44)})
    assert manager.used_count == 2
    assert (index.find("a").page, index.find("a").checksum, index.find("b").page) == (1, 11, 4)
    assert index.stale == []


def test_entries_of_a_smaller_pool_and_doubles_are_dropped_first():
    index = PageIndex(PageManager(TOTAL), {1: PageEntry("a", 1), 2: PageEntry("a", 1), 9: PageEntry("b", 1)})
    assert sorted(index.stale) == [2, 9]
    assert index.find("b") is None


class Lifecycle(RuleBasedStateMachine):
    """Random life of host pages against the durable table as the store would have it."""

    def __init__(self):
        super().__init__()
        self.manager = PageManager(TOTAL)
        self.index = PageIndex(self.manager, {})
        self.table = {}  # durable: page -> identity
        self.pages = []  # every HostPage ever taken that is not free again
        self.drops = []

    @rule(identity=st.sampled_from("abcdefghij"), sequence=st.sampled_from(["s1", "s2"]))
    def seal(self, identity, sequence):
        page = self.index.find(identity) or self.index.take(identity)
        if page is None:
            assert self.manager.free_count == 0
            return
        if page.state is PageState.FILLING and page not in self.pages:
            assert page.page not in self.table, "a page that an entry names is about to be written"
            self.pages.append(page)
        self.index.hold(page, sequence)

    def _some(self, state):
        return [page for page in self.pages if page.state is state]

    @precondition(lambda self: self._some(PageState.FILLING))
    @rule(ok=st.booleans(), data=st.data())
    def complete(self, ok, data):
        page = data.draw(st.sampled_from(self._some(PageState.FILLING)))
        if ok:
            self.index.filled(page, 7)
        else:
            self.index.failed(page)
            self.pages.remove(page)

    @precondition(lambda self: self._some(PageState.FILLED))
    @rule(data=st.data())
    def publish(self, data):
        page = data.draw(st.sampled_from(self._some(PageState.FILLED)))
        self.table[page.page] = page.identity
        self.index.published(page)

    @rule(count=st.integers(1, 3))
    def evict(self, count):
        for page in self.index.evict(count):
            assert self.manager.holders(page.page) == ("entry",), "a page that backs a running Sequence was evicted"
            self.drops.append(page)

    @precondition(lambda self: self.drops)
    @rule()
    def drop_answered(self):
        page = self.drops.pop(0)
        self.table.pop(page.page)
        self.index.dropped(page.page)
        self.pages.remove(page)

    @rule(sequence=st.sampled_from(["s1", "s2"]))
    def leave(self, sequence):
        self.index.release(sequence)
        assert self.manager.held_by(sequence) == []

    @invariant()
    def consistent(self):
        assert self.manager.problems() == []
        assert self.manager.used_count == len(self.pages)
        for number, identity in self.table.items():
            (page,) = [p for p in self.pages if p.page == number]
            assert page.identity == identity
            assert page.state in (PageState.PUBLISHED, PageState.DROPPING)


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
