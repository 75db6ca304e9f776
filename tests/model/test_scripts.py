"""The explorer over the real scripts: they hold in small worlds, and a mistake in one of them shows."""

import pytest

from chaos.hunt import look_in_module
from chaos.mistakes import MISTAKES, InModule, copy_sources, put_back
from tests.model.explorer import explore
from tests.model.scripts import script_store
from tests.model.small import SMALL
from tests.model.world import World

FAST = ("expected length", "held list", "incarnation of a claim", "strike reset")


@pytest.fixture(scope="module")
def store():
    with script_store() as made:
        yield made


@pytest.mark.parametrize("name", FAST)
def test_nothing_breaks_with_the_scripts(name, store):
    found = explore(World(store=store.clone(), **SMALL[name]))
    assert not found.violation, (found.violation, found.path)
    assert found.states >= 10


def test_a_copy_is_another_store(store):
    world = World(store=store.clone(), **SMALL["held list"])
    world.start(0)
    before = world.clone()
    world.claim(0)
    assert (world.store.record("job-0").fence, before.store.record("job-0").fence) == (1, 0)
    before.claim(0)
    assert before.store.key() == world.store.key()


@pytest.mark.parametrize("name", ["claim without the held list", "claim without the incarnation check"])
def test_a_mistake_in_a_script_is_found_by_its_sign(name, tmp_path):
    (mistake,) = (mistake for mistake in MISTAKES if mistake.name == name)
    assert isinstance(mistake.where, InModule)
    copy = copy_sources(tmp_path)
    with put_back(mistake, copy):
        assert mistake.own(look_in_module(mistake.where, copy))
    assert not mistake.own(look_in_module(mistake.where, copy))
