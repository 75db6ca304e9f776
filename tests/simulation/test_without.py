"""The simulator finds what it is there for: with any one mechanism removed, some seed breaks a promise, and none does with it."""

import pytest

from tests.simulation.seeds import quiet_process, run_seed, scratch
from tests.simulation.without import WITHOUT
from tests.simulation.world import Failed

ENOUGH = 600  #: seeds in which each lack must show


@pytest.fixture(scope="module")
def folder():
    with quiet_process(), scratch() as folder:
        yield folder


@pytest.mark.parametrize("mechanism", WITHOUT)
def test_each_mechanism_is_needed(mechanism, folder):
    for seed in range(ENOUGH):
        try:
            run_seed(seed, folder, WITHOUT[mechanism])
        except Failed:
            run_seed(seed, folder)  # with all mechanisms nothing is wrong with this seed
            return
    pytest.fail(f"{ENOUGH} seeds without {mechanism}, and nothing broke")
