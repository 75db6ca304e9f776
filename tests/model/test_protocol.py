"""The protocol explored: nothing breaks with all mechanisms, something does without any one of them."""

import pytest

from tests.model.explorer import explore
from tests.model.small import SMALL
from tests.model.world import Budget, World


@pytest.mark.parametrize("mechanism", SMALL)
def test_each_mechanism_is_needed(mechanism):
    found = explore(World(without=mechanism, **SMALL[mechanism]))
    assert found.violation, f"{found.states} states and nothing broke"
    assert not explore(World(**SMALL[mechanism])).violation


@pytest.mark.timeout(600)  # all states of a world: two minutes alone, more beside others
@pytest.mark.parametrize(
    "world",
    [
        {"workers": 2, "jobs": 1, "tokens": 2, "budget": Budget(kills=1, judgements=1, losses=1, doubles=1)},
        {"workers": 2, "jobs": 1, "tokens": 2, "budget": Budget(kills=0, judgements=2, losses=0, doubles=1, cancels=1)},
        {"workers": 1, "jobs": 2, "tokens": 1, "budget": Budget(kills=2, judgements=0, losses=1, doubles=0)},
    ],
    ids=["all faults", "judged twice, cancelled", "two jobs, two kills"],
)
def test_nothing_breaks(world):
    found = explore(World(**world))
    assert not found.violation, (found.violation, found.path)
    assert found.states > 1000
