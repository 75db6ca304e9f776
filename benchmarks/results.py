"""What ``make bench`` left in its folder, for plots and tables."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PYTEST, EVICTION = "pytest.json", "eviction.json"
Ratios = dict[str, dict[str, dict[str, float]]]  #: trace -> capacity -> policy or "optimum" -> hit ratio


@dataclass(frozen=True, slots=True)
class Measured:
    """One benchmark. ``info`` is its ``extra_info``: seconds of each side round by round, our ``ratio`` over each, and more."""

    test: str
    params: dict[str, Any]
    info: dict[str, Any]

    def seconds(self, side: str) -> float:
        return float(statistics.median(self.info["seconds"][side]))

    def ratio(self, side: str) -> float:
        return float(self.info["ratio"][side])

    def of(self, side: str, quantity: str) -> float:
        """What ``harness.describe`` tells of a side."""
        return float(self.info[side][quantity])


class Results:
    def __init__(self, folder: Path) -> None:
        benchmarks = json.loads((folder / PYTEST).read_text())["benchmarks"]
        self._all = [Measured(b["name"].partition("[")[0], b["params"] or {}, b["extra_info"]) for b in benchmarks]
        self.eviction: Ratios = json.loads((folder / EVICTION).read_text())

    def of(self, test: str, **params: object) -> list[Measured]:
        """The benchmarks of one test function that have these parameters, in the order in which they ran."""
        return [m for m in self._all if m.test == test and params.items() <= m.params.items()]

    def one(self, test: str, **params: object) -> Measured:
        (found,) = self.of(test, **params)
        return found

    def values(self, test: str, name: str) -> list[Any]:
        """The different values of a parameter, in order."""
        return list(dict.fromkeys(m.params[name] for m in self.of(test)))
