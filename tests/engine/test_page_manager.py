"""The page manager against a dictionary, driven by hypothesis."""

import sys

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from engine import PageManager

TOTAL = 12


class PageManagerMachine(RuleBasedStateMachine):
    held = Bundle("held")  # (page, owner) pairs that the model believes in

    def __init__(self):
        super().__init__()
        self.manager = PageManager(TOTAL)
        self.model: dict[int, list[str]] = {}

    @rule(target=held, count=st.integers(0, TOTAL + 1), owner=st.sampled_from("abc"))
    def allocate(self, count, owner):
        free = sorted(set(range(TOTAL)) - self.model.keys())
        if count > len(free):
            with pytest.raises(MemoryError):
                self.manager.allocate(count, owner)
            return multiple()
        pages = self.manager.allocate(count, owner)
        assert pages == free[:count]  # lowest id first
        for page in pages:
            self.model[page] = [owner]
        return multiple(*((page, owner) for page in pages))

    @rule(target=held, wanted=st.lists(st.integers(0, TOTAL - 1), max_size=4), owner=st.sampled_from("abc"))
    def take(self, wanted, owner):
        if len(set(wanted)) < len(wanted) or self.model.keys() & set(wanted):
            with pytest.raises(ValueError, match="not all of"):
                self.manager.take(wanted, owner)
            return multiple()
        self.manager.take(wanted, owner)
        for page in wanted:
            self.model[page] = [owner]
        return multiple(*((page, owner) for page in wanted))

    @rule(target=held, pair=held, owner=st.sampled_from("abc"))
    def share(self, pair, owner):
        page, _ = pair
        if page not in self.model:
            with pytest.raises(ValueError, match="not held"):
                self.manager.share([page], owner)
            return multiple()
        self.manager.share([page], owner)
        self.model[page].append(owner)
        return (page, owner)

    @rule(pair=consumes(held))
    def free(self, pair):
        page, owner = pair
        if owner not in self.model.get(page, ()):
            with pytest.raises(ValueError, match="not held"):
                self.manager.free([page], owner=owner)
            return
        self.manager.free([page], owner=owner)
        self.model[page].remove(owner)
        if not self.model[page]:
            del self.model[page]

    @rule(pair=held, target_place=st.sampled_from(["gpu", "cpu"]))
    def swap(self, pair, target_place):
        page, _ = pair
        if page in self.model:
            self.manager.swap_to([page], target_place)
            assert self.manager.page_location[page] == target_place

    @invariant()
    def agrees(self):
        assert self.manager.problems() == []
        assert self.manager.used_count == len(self.model)
        assert self.manager.free_count == TOTAL - len(self.model)
        for page, owners in self.model.items():
            assert sorted(self.manager.holders(page)) == sorted(owners)
        for owner in "abc":
            assert self.manager.held_by(owner) == sorted(page for page, owners in self.model.items() if owner in owners)
            assert self.manager.held_alone_by(owner) == sum(owners == [owner] for owners in self.model.values())


TestPageManagerMachine = PageManagerMachine.TestCase


def test_a_double_free_is_an_error_and_changes_nothing():
    manager = PageManager(4)
    pages = manager.allocate(2, "a")
    manager.free(pages[:1])
    with pytest.raises(ValueError, match="not held"):
        manager.free(pages)
    assert manager.used_count == 1


def test_a_shared_page_needs_a_name_to_be_freed():
    manager = PageManager(4)
    (page,) = manager.allocate(1, "a")
    manager.share([page], "copy")
    with pytest.raises(ValueError, match="shared"):
        manager.free([page])
    manager.free([page], owner="a")
    assert manager.holders(page) == ("copy",)
    assert manager.free_count == 3


def test_bookkeeping_is_free_of_torch():
    import subprocess

    code = (
        "import sys; from engine import PageManager; import engine.model_source, engine.sampler; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
