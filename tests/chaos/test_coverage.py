"""Every kind of trouble of the design is tried by something that is there, and the table that says so is true."""

import re
from pathlib import Path

import pytest

from chaos.scenarios import SCENARIOS
from tests.chaos.coverage import TROUBLES, page, scenarios_of

ROOT = Path(__file__).parents[2]


def test_the_table_has_all_of_them():
    assert list(TROUBLES) == [f"S{number}" for number in range(1, 42)]


@pytest.mark.parametrize("number", TROUBLES)
def test_each_is_tried_by_something_that_is_there(number: str):
    trouble = TROUBLES[number]
    assert trouble.tests or scenarios_of(number)
    for test in trouble.tests:
        path, _, name = test.partition("::")
        assert re.search(rf"def {name}\(" if name else "def test_", (ROOT / path).read_text()), test


def test_every_scenario_says_what_it_covers():
    for scenario in SCENARIOS:
        assert set(scenario.covers.split()) <= TROUBLES.keys(), scenario.name
        assert scenario.covers


def test_the_page_is_the_table():
    assert (ROOT / "docs" / "chaos.md").read_text() == page(), "python -m tests.chaos.coverage > docs/chaos.md"
