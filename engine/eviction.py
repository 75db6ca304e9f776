"""Which page leaves when another one needs its place: FIFO, LRU, ARC. Keys only, no tensors.

One policy watches one pool, the device's or the host's: it learns what is resident and what is taken, and names who leaves. Moving
bytes and knowing what is in use are the caller's. A miss is ``victim(key)`` if the pool is full, then ``insert(key)``.

A *reader* is a Sequence that maps the page, or the prefix cache that answers with it. Only a new reader is an access (``hit``);
what it reads later is a ``refresh``. A decode step reads every page of its Sequence: as accesses, these correlated references
(O'Neil et al., LRU-K, SIGMOD 1993) would make every page "frequent" in two steps, and ARC would degenerate to LRU.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(ABC, Generic[K]):
    """The resident keys of one pool and which goes next. Not thread-safe: it belongs to the step loop, like the pool's ids."""

    name: str

    @abstractmethod
    def insert(self, key: K) -> None:
        """``key`` is resident from now on; it was missing before."""

    @abstractmethod
    def hit(self, key: K) -> None:
        """A *new* reader takes the resident ``key``: counts for frequency and recency. KeyError: it is not resident."""

    @abstractmethod
    def refresh(self, key: K) -> None:
        """A reader of ``key`` read it again, e.g. lets go of it now: counts for recency only. KeyError: it is not resident."""

    @abstractmethod
    def victim(self, incoming: K | None, evictable: Callable[[K], bool]) -> K | None:
        """Choose the key that leaves so that ``incoming`` can come (None: not known yet); on return it is no longer resident.

        Only keys for which ``evictable`` is true leave. None: there is no such key, and what was resident still is. LRU and ARC
        take a pinned key that they meet at the old end for just used, so that the next call does not meet it again.
        """

    @abstractmethod
    def discard(self, key: K) -> None:
        """``key`` is gone for another reason, e.g. its bytes did not verify: nothing is remembered of it. Others are ignored."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: K) -> bool: ...

    @abstractmethod
    def problems(self) -> list[str]:
        """What is inconsistent, in words; empty when all is well."""


class Fifo(EvictionPolicy[K]):
    """First in, first out: reads change nothing."""

    name = "fifo"

    def __init__(self) -> None:
        # The next to go first. Not a dict: the front of one that lost its first n keys is found in O(n), here in O(1).
        self._keys: OrderedDict[K, None] = OrderedDict()

    def insert(self, key: K) -> None:
        assert key not in self._keys, f"{key!r} is resident already"
        self._keys[key] = None

    def hit(self, key: K) -> None:
        if key not in self._keys:
            raise KeyError(key)

    def refresh(self, key: K) -> None:
        self.hit(key)

    def victim(self, incoming: K | None, evictable: Callable[[K], bool]) -> K | None:
        for key in self._keys:  # past the pinned ones every time: rotating them would forget when they came
            if evictable(key):
                del self._keys[key]
                return key
        return None

    def discard(self, key: K) -> None:
        self._keys.pop(key, None)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: K) -> bool:
        return key in self._keys

    def problems(self) -> list[str]:
        return []  # a list cannot contradict itself


class Lru(Fifo[K]):
    """Least recently used: a queue in which every read goes back to the young end."""

    name = "lru"

    def hit(self, key: K) -> None:
        self._keys.move_to_end(key)

    def victim(self, incoming: K | None, evictable: Callable[[K], bool]) -> K | None:
        return _take_oldest(self._keys, evictable)


class Arc(EvictionPolicy[K]):
    """Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003; names and cases are the paper's.

    T1 holds keys that were taken once since they came, T2 those taken again; B1 and B2 remember what left T1 and T2 (*ghosts*).
    A ghost that returns shows which list was too short and moves ``p``, the length T1 should have. Each list has its oldest first.

    ``victim`` is the paper's adaptation and REPLACE, ``insert`` the rest. One thing moved: Case IV shortens the ghost lists in
    ``insert``, not before REPLACE. REPLACE ignores their lengths and leaves |T1|+|B1| and |T2|+|B2| as they were, so after the
    ``insert`` every list is as published; and a key that never comes after all costs no memory of others.
    """

    name = "arc"

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self.capacity = capacity
        self.p = 0.0
        self.t1: OrderedDict[K, None] = OrderedDict()
        self.t2: OrderedDict[K, None] = OrderedDict()
        #: ghost -> whether ``p`` was adapted to its return: ``victim`` announced it, ``insert`` is still to come
        self.b1: OrderedDict[K, bool] = OrderedDict()
        self.b2: OrderedDict[K, bool] = OrderedDict()

    def insert(self, key: K) -> None:
        assert key not in self, f"{key!r} is resident already"
        assert len(self) < self.capacity, f"{self.capacity} keys are resident already"
        if key in self.b1 or key in self.b2:  # Cases II and III
            self._adapt(key)
            del (self.b1 if key in self.b1 else self.b2)[key]
            self.t2[key] = None
        else:
            if len(self.t1) + len(self.b1) == self.capacity:  # Case IV A
                self.b1.popitem(last=False)
            elif len(self) + len(self.b1) + len(self.b2) == 2 * self.capacity:  # Case IV B
                self.b2.popitem(last=False)
            self.t1[key] = None

    def hit(self, key: K) -> None:
        if key in self.t1:
            self.t2[key] = self.t1.pop(key)
        else:
            self.t2.move_to_end(key)

    def refresh(self, key: K) -> None:
        (self.t1 if key in self.t1 else self.t2).move_to_end(key)

    def victim(self, incoming: K | None, evictable: Callable[[K], bool]) -> K | None:
        if incoming is not None:
            self._adapt(incoming)
        from_t1 = len(self.t1) > self.p or (incoming in self.b2 and len(self.t1) == self.p)
        order = ((self.t1, self.b1), (self.t2, self.b2)) if from_t1 else ((self.t2, self.b2), (self.t1, self.b1))
        for resident, ghosts in order:  # the second if the first has none that may leave
            key = _take_oldest(resident, evictable)
            if key is not None:
                ghosts[key] = False
                return key
        return None

    def discard(self, key: K) -> None:
        self.t1.pop(key, None)
        self.t2.pop(key, None)

    def __len__(self) -> int:
        return len(self.t1) + len(self.t2)

    def __contains__(self, key: K) -> bool:
        return key in self.t1 or key in self.t2

    def problems(self) -> list[str]:
        sizes = {name: len(getattr(self, name)) for name in ("t1", "t2", "b1", "b2")}
        found, c = [], self.capacity
        if len(self.t1.keys() | self.t2.keys() | self.b1.keys() | self.b2.keys()) != sum(sizes.values()):
            found.append(f"a key is in two of ARC's lists: {sizes}")
        if len(self) > c or sizes["t1"] + sizes["b1"] > c or sum(sizes.values()) > 2 * c:
            found.append(f"ARC's lists are longer than capacity {c} allows: {sizes}")
        if not 0 <= self.p <= c:
            found.append(f"ARC's p is {self.p}, outside 0..{c}")
        return found

    def _adapt(self, key: K) -> None:
        """Move ``p`` if ``key`` is a ghost, once per return. As the youngest ghost it is not forgotten while it is awaited."""
        for ghosts, others, sign in ((self.b1, self.b2, 1), (self.b2, self.b1, -1)):
            if key in ghosts and not ghosts[key]:
                delta = max(len(others) / len(ghosts), 1.0)
                self.p = min(max(self.p + sign * delta, 0.0), float(self.capacity))
                ghosts[key] = True
                ghosts.move_to_end(key)


def _take_oldest(keys: OrderedDict[K, None], evictable: Callable[[K], bool]) -> K | None:
    """Remove the oldest key that may leave; pinned ones before it become the youngest. Once around at most."""
    for _ in range(len(keys)):
        key = next(iter(keys))
        if evictable(key):
            del keys[key]
            return key
        keys.move_to_end(key)
    return None


def make_policy(name: str, capacity: int) -> EvictionPolicy[K]:
    """The policy for a pool of ``capacity`` pages. ValueError: no policy has this name, or the pool no pages."""
    makers: dict[str, Callable[[], EvictionPolicy[K]]] = {"fifo": Fifo, "lru": Lru, "arc": lambda: Arc(capacity)}
    if name not in makers:
        raise ValueError(f"no eviction policy is called {name!r}: choose one of {', '.join(makers)}")
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, not {capacity}")
    return makers[name]()
