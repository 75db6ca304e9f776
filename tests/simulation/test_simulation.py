"""Thousands of small worlds in which everything goes wrong: no promise is broken, and every fault is known to have happened."""

import subprocess
import sys
from collections import Counter

import pytest

from tests.simulation.seeds import quiet_process, run_seed, scratch

SEEDS, EACH = 1500, 250
#: what must have happened somewhere in these seeds, or the run has shown nothing
HAPPENED = (
    "commit answered already",
    "commit answered terminal",
    "copied on write",
    "damaged page behind an entry",
    "declared dead",
    "died inside a write",
    "drained",
    "dropped to be replayed",
    "fdatasync failed",
    "jobs taken over",
    "killed",
    "power lost",
    "pwrite failed",
    "recovery was as planned",
    "redis crashed",
    "redis lost its tail",
    "redis stood still",
    "replayed",
    "resumed",
    "stopped",
    "swapped in",
    "swapped out",
    "verify failures",
)


@pytest.fixture(scope="module")
def folder():
    with quiet_process(), scratch() as folder:
        yield folder


@pytest.fixture(scope="module")
def happened():
    return Counter()


@pytest.mark.parametrize("first", range(0, SEEDS, EACH))
def test_nothing_is_lost_changed_or_repeated(first, folder, happened):
    for seed in range(first, first + EACH):
        happened += run_seed(seed, folder).counts


def test_every_fault_happened(happened):
    """After the seeds, in this file's order."""
    if happened["started"] < SEEDS:
        pytest.skip("not all seeds were run")
    assert [name for name in HAPPENED if not happened[name]] == []


@pytest.mark.parametrize("seed", [3, 31, 218])
def test_a_seed_is_the_same_run_every_time(seed, folder):
    first = run_seed(seed, folder)
    run_seed(seed + 1, folder)
    assert run_seed(seed, folder) == first


def test_a_seed_is_the_same_run_in_every_process():
    """Whatever order Python gives to sets of strings there."""
    script = (
        "from tests.simulation.seeds import quiet_process, run_seed, scratch\n"
        "with quiet_process(), scratch() as folder:\n"
        "    print([run_seed(seed, folder).digest for seed in range(40)])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": number, "PATH": ""}, capture_output=True, check=True, timeout=120
        ).stdout
        for number in ("1", "2")
    }
    assert len(outputs) == 1
