"""Eviction policies: by hand, against the paper, under arbitrary use, and on the benchmark's traces."""

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.eviction_traces import CAPACITIES, POLICIES, TRACES, hit_ratio, optimum, shifting_fast
from engine.eviction import Arc, Fifo, Lru, make_policy


def anything(_key):
    return True


def nothing(_key):
    return False


def request(policy, key, capacity):
    """One read as the pools do it. Returns the key that left, if one did."""
    if key in policy:
        policy.hit(key)
        return None
    victim = policy.victim(key, anything) if len(policy) == capacity else None
    policy.insert(key)
    return victim


def lists(arc):
    return tuple("".join(keys) for keys in (arc.t1, arc.t2, arc.b1, arc.b2))


class TestByHand:
    def test_fifo_ignores_reads(self):
        fifo = Fifo()
        assert [request(fifo, key, 3) for key in "abcadaeb"] == [None, None, None, None, "a", "b", "c", "d"]
        #       resident: a ab abc abc bcd cda dae aeb

    def test_lru_keeps_what_was_read_last(self):
        lru = Lru()
        assert [request(lru, key, 3) for key in "abcadaeb"] == [None, None, None, None, "b", None, "c", "d"]
        #       resident: a ab abc bca cad cda dae aeb

    @pytest.mark.parametrize(
        ("capacity", "trace"),
        [
            (
                2,
                [  # request, T1, T2, B1, B2 (the oldest first), p
                    ("a", "a", "", "", "", 0),
                    ("b", "ab", "", "", "", 0),
                    ("c", "bc", "", "", "", 0),  # IV A, T1 is all there is: a leaves without a ghost
                    ("b", "c", "b", "", "", 0),  # I
                    ("d", "d", "b", "c", "", 0),  # IV B: |T1| = 1 > p
                    ("c", "d", "c", "", "b", 1),  # II: p rises, |T1| = p spares T1
                    ("b", "", "cb", "d", "", 0),  # III: p falls, |T1| = 1 > p
                    ("e", "e", "b", "d", "c", 0),  # IV B: T1 is empty
                    ("f", "f", "b", "e", "c", 0),  # IV A: |T1|+|B1| = c, d is forgotten
                    ("c", "", "bc", "ef", "", 0),  # III: p cannot fall below 0
                    ("e", "", "ce", "f", "b", 1),  # II
                    ("g", "g", "e", "f", "c", 1),  # IV B with 2c keys: b is forgotten
                    ("h", "gh", "", "", "ce", 1),  # IV A: f is forgotten; |T1| = p, so e leaves T2
                    ("i", "hi", "", "", "ce", 1),  # IV A, T1 is all there is: g leaves without a ghost
                    ("c", "i", "c", "h", "e", 0),  # III
                ],
            ),
            (
                3,
                [
                    ("c", "c", "", "", "", 0),
                    ("f", "cf", "", "", "", 0),
                    ("c", "f", "c", "", "", 0),  # I
                    ("a", "fa", "c", "", "", 0),  # not full yet
                    ("b", "ab", "c", "f", "", 0),  # IV B
                    ("a", "b", "ca", "f", "", 0),  # I
                    ("e", "e", "ca", "fb", "", 0),  # IV B
                    ("b", "e", "ab", "f", "c", 1),  # II: |B1| = 2, |B2| = 0
                    ("d", "ed", "b", "f", "ca", 1),  # IV B: |T1| = p spares T1
                    ("f", "ed", "f", "", "cab", 3),  # II: |B2| / |B1| = 2
                    ("a", "d", "fa", "e", "cb", 2),  # III: |T1| = p, and the request is in B2: T1 pays
                    ("e", "d", "ae", "", "cbf", 3),  # II: by 2, but p cannot exceed c
                ],
            ),
        ],
    )
    def test_arc(self, capacity, trace):
        arc = Arc(capacity)
        for key, *expected, p in trace:
            request(arc, key, capacity)
            assert (key, lists(arc), arc.p) == (key, tuple(expected), p)
            assert arc.problems() == []


class PaperArc:
    """ARC(c) of Megiddo and Modha, FAST 2003, figure 4, line by line. Index 0 is the LRU end."""

    def __init__(self, c):
        self.c, self.p = c, 0.0
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []

    def request(self, x):
        c, t1, t2, b1, b2 = self.c, self.t1, self.t2, self.b1, self.b2
        if x in t1 or x in t2:  # Case I
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
        elif x in b1:  # Case II
            self.p = min(self.p + (1 if len(b1) >= len(b2) else len(b2) / len(b1)), c)
            self.replace(x)
            b1.remove(x)
            t2.append(x)
        elif x in b2:  # Case III
            self.p = max(self.p - (1 if len(b2) >= len(b1) else len(b1) / len(b2)), 0)
            self.replace(x)
            b2.remove(x)
            t2.append(x)
        else:  # Case IV
            if len(t1) + len(b1) == c:  # Case A
                if len(t1) < c:
                    b1.pop(0)
                    self.replace(x)
                else:
                    t1.pop(0)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:  # Case B
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    b2.pop(0)
                self.replace(x)
            t1.append(x)

    def replace(self, x):
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))


class TestArcIsThePapers:
    def compare(self, c, trace):
        arc, paper = Arc(c), PaperArc(c)
        for x in trace:
            request(arc, x, c)
            paper.request(x)
            assert [list(keys) for keys in (arc.t1, arc.t2, arc.b1, arc.b2)] == [paper.t1, paper.t2, paper.b1, paper.b2]
            assert arc.p == paper.p
            yield arc.p

    @settings(deadline=None, max_examples=300)
    @given(c=st.integers(1, 6), trace=st.lists(st.integers(0, 14), max_size=120))
    def test_on_arbitrary_traces(self, c, trace):
        list(self.compare(c, trace))

    @pytest.mark.parametrize("c", [1, 2, 3, 5, 8, 13, 34])
    def test_on_long_traces(self, c):
        seen = set()
        for seed in range(20):
            rng = random.Random(seed)
            trace = []
            while len(trace) < 600:  # reads of sets that the pool holds or does not, with scans between them
                base, size = rng.randrange(3) * c, rng.randint(1, 3 * c)
                trace += [base + rng.randrange(size) for _ in range(rng.randrange(6 * c))]
                trace += range(1000 * len(trace), 1000 * len(trace) + rng.randrange(c))
            seen |= set(self.compare(c, trace))
        assert 0 in seen
        assert max(seen) > c / 2  # p went up and down
        assert c < 5 or any(p % 1 for p in seen)  # below 5 every step is a whole number, since |B1|+|B2| <= c


class TestReaders:
    @pytest.mark.parametrize("name", POLICIES)
    def test_only_a_resident_key_can_be_read(self, name):
        policy = make_policy(name, 1)
        policy.insert("a")
        assert policy.victim("b", anything) == "a"
        for read in (policy.hit, policy.refresh):
            with pytest.raises(KeyError):
                read("a")

    @pytest.mark.parametrize("name", ["lru", "arc"])
    def test_a_refresh_is_recent(self, name):
        policy = make_policy(name, 3)
        for key in "abc":
            policy.insert(key)
        policy.refresh("a")
        assert policy.victim("d", anything) == "b"

    def test_decode_steps_do_not_make_a_page_frequent(self):
        arc = Arc(4)
        for key in "hi":  # a shared prefix: two jobs take it
            arc.insert(key)
            arc.hit(key)
        for job in ("ab", "cd", "ef"):  # jobs of their own, each of many steps
            for page in job:
                request(arc, page, 4)
            for _step in range(50):
                for page in job:
                    arc.refresh(page)
        assert lists(arc) == ("ef", "hi", "cd", "")

    def test_refresh_in_t2_is_recent_there(self):
        arc = Arc(2)
        for key in "abab":
            request(arc, key, 2)
        arc.refresh("a")
        assert lists(arc) == ("", "ba", "", "")


class TestPinned:
    def test_fifo_keeps_its_order(self):
        fifo = Fifo()
        for key in "abcd":
            fifo.insert(key)
        assert fifo.victim(None, lambda key: key not in "ab") == "c"
        assert fifo.victim(None, anything) == "a"

    def test_arc_takes_from_the_other_list(self):
        arc = Arc(4)
        for key in "abcdcd":
            request(arc, key, 4)
        assert lists(arc) == ("ab", "cd", "", "")
        assert arc.victim("e", lambda key: key not in "ab") == "c"  # REPLACE wants T1
        arc.p = 4.0
        assert arc.victim("e", lambda key: key != "d") == "a"  # REPLACE wants T2
        assert lists(arc) == ("b", "d", "a", "c")

    @pytest.mark.parametrize("name", ["lru", "arc"])
    @pytest.mark.parametrize("frequent", [False, True])
    def test_each_pinned_key_is_asked_about_once(self, name, frequent):
        total, pinned, asked = 1000, 600, 0
        policy = make_policy(name, total)
        for key in range(total):
            policy.insert(key)
            if frequent:
                policy.hit(key)

        def evictable(key):
            nonlocal asked
            asked += 1
            return key >= pinned

        for number in range(total - pinned):
            assert policy.victim(None, evictable) == pinned + number
        assert asked == total
        assert policy.victim(None, evictable) is None
        assert len(policy) == pinned

    def test_a_return_is_counted_once(self):
        arc = Arc(4)
        for key in "abcdcdef":
            request(arc, key, 4)
        assert (lists(arc), arc.p) == (("ef", "cd", "ab", ""), 0)
        assert arc.victim("a", nothing) is None  # everything is in use: the Sequence waits and asks again
        assert arc.victim("a", nothing) is None
        assert (lists(arc), arc.p) == (("ef", "cd", "ba", ""), 1)
        assert arc.victim("a", anything) == "e"
        assert arc.p == 1
        arc.insert("a")
        assert (lists(arc), arc.p) == (("f", "cda", "be", ""), 1)


class TestArcWithFreePages:
    def test_a_ghost_that_finds_a_free_page_counts_as_one(self):
        arc = Arc(3)
        for key in "abcbd":
            request(arc, key, 3)
        assert (lists(arc), arc.p) == (("cd", "b", "a", ""), 0)
        arc.discard("b")
        arc.insert("a")
        assert (lists(arc), arc.p) == (("cd", "a", "", ""), 1)

    def test_what_is_discarded_is_a_stranger_when_it_returns(self):
        arc = Arc(2)
        for key in "abb":
            request(arc, key, 2)
        arc.discard("b")
        arc.discard("b")
        arc.insert("b")
        assert (lists(arc), arc.p) == (("ab", "", "", ""), 0)

    def test_an_awaited_ghost_is_not_forgotten(self):
        arc = Arc(4)
        for key in "abcdcdef":
            request(arc, key, 4)
        assert lists(arc) == ("ef", "cd", "ab", "")
        assert arc.victim("a", anything) == "e"  # a is on its way
        arc.insert("g")  # a new page is faster
        arc.victim("a", anything)
        arc.insert("a")
        assert "a" in arc.t2
        assert arc.p == 1
        assert arc.problems() == []

    def test_an_impossible_state_is_told(self):
        arc = Arc(2)
        arc.t1["a"] = arc.t2["a"] = arc.t1["b"] = None
        arc.p = 3.0
        assert len(arc.problems()) == 3

    @pytest.mark.parametrize("name", POLICIES)
    def test_inserting_twice_is_a_bug_of_the_caller(self, name):
        policy = make_policy(name, 2)
        policy.insert("a")
        with pytest.raises(AssertionError):
            policy.insert("a")


class TestFactory:
    @pytest.mark.parametrize("name", POLICIES)
    def test_names(self, name):
        assert make_policy(name, 1).name == name
        with pytest.raises(ValueError, match="at least 1, not 0"):
            make_policy(name, 0)

    def test_an_unknown_name_is_answered_with_the_choices(self):
        with pytest.raises(ValueError, match="'lfu': choose one of fifo, lru, arc"):
            make_policy("lfu", 1)


class ContractMachine(RuleBasedStateMachine):
    """Whatever the caller does: who is resident, that pinned keys stay, and that None means that nothing could leave."""

    keys = st.integers(0, 11)

    @initialize(name=st.sampled_from(POLICIES), capacity=st.integers(1, 5))
    def start(self, name, capacity):
        self.policy, self.capacity = make_policy(name, capacity), capacity
        self.resident: list[int] = []  # in the order they came
        self.pinned: set[int] = set()

    def evict(self, incoming):
        free = [key for key in self.resident if key not in self.pinned]
        victim = self.policy.victim(incoming, lambda key: key not in self.pinned)
        if not free:
            assert victim is None
            return
        assert victim == free[0] if isinstance(self.policy, Fifo) and not isinstance(self.policy, Lru) else victim in free
        self.resident.remove(victim)

    @rule(key=keys)
    def read(self, key):
        if key in self.resident:
            self.policy.hit(key)
            return
        if len(self.resident) == self.capacity:
            self.evict(key)
        if len(self.resident) < self.capacity:
            self.policy.insert(key)
            self.resident.append(key)

    @rule(key=st.none() | keys)
    def make_room(self, key):
        if key not in self.resident:  # the page that was to come may still come, later or never
            self.evict(key)

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def refresh(self, data):
        self.policy.refresh(data.draw(st.sampled_from(self.resident)))

    @rule(key=keys)
    def discard(self, key):
        self.policy.discard(key)
        self.resident = [other for other in self.resident if other != key]

    @rule(key=keys)
    def pin_or_unpin(self, key):
        self.pinned ^= {key}

    @invariant()
    def holds(self):
        assert self.policy.problems() == []
        assert [key for key in range(12) if key in self.policy] == sorted(self.resident)
        assert len(self.policy) == len(self.resident)


TestContract = ContractMachine.TestCase
TestContract.settings = settings(deadline=None, max_examples=150, stateful_step_count=50)


@cache
def trace(name):
    return TRACES[name]()


def arc_gain(name, capacity):
    """ARC's hits for each hit of LRU."""
    lru, arc = (hit_ratio(policy, trace(name), capacity) for policy in ("lru", "arc"))
    return arc / lru if lru else 1.0 + arc


class TestTraces:
    @pytest.mark.parametrize("capacity", CAPACITIES)
    @pytest.mark.parametrize("name", sorted(TRACES.keys() - {shifting_fast.__name__}))
    def test_arc_loses_at_most_two_percent_of_the_hits_of_lru(self, name, capacity):
        assert arc_gain(name, capacity) > 0.98

    @pytest.mark.parametrize("capacity", CAPACITIES)
    def test_where_arc_has_not_learned_yet_it_loses_less_than_five_percent(self, capacity):
        assert arc_gain("shifting_fast", capacity) > 0.95

    @pytest.mark.parametrize("capacity", [1024, 2048, 4096])
    def test_arc_keeps_a_hot_set_through_scans(self, capacity):
        assert arc_gain("scan_over_hot_set", capacity) > 1.5

    @pytest.mark.parametrize("name", ["loop", "shared_prefixes"])
    def test_no_policy_beats_the_optimum(self, name):
        assert max(hit_ratio(policy, trace(name), 1024) for policy in POLICIES) <= optimum(trace(name), 1024)

    def test_the_optimum_by_hand(self):
        # Resident after each read: 0, 01, 02, 02, 01, 01, 03. Page 1 leaves for 2 since 0 is read sooner, then 2 for 1, then any.
        assert optimum([0, 1, 2, 0, 1, 0, 3], 2) == 2 / 7

    @pytest.mark.parametrize("name", sorted(TRACES))
    def test_traces_are_reproducible(self, name):
        assert TRACES[name]() == trace(name)
