"""A figure with its goal: what every section gives back, and what tables, JSON and plots are made of."""

import operator
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "=": lambda value, goal: round(value, 2) == goal,
}


@dataclass(frozen=True, slots=True)
class Goal:
    """``=`` compares to two decimals."""

    relation: str  #: a key of ``_COMPARE``
    value: float

    def met(self, value: float) -> bool:
        return _COMPARE[self.relation](value, self.value)

    def __str__(self) -> str:
        return f"{self.relation} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str = ""
    goal: Goal | None = None

    @property
    def verdict(self) -> str:
        """``yes`` or ``no``; empty where there is no goal."""
        return "" if self.goal is None else "yes" if self.goal.met(self.value) else "no"

    def as_json(self) -> dict[str, Any]:
        goal = None if self.goal is None else str(self.goal)
        return {"name": self.name, "value": self.value, "unit": self.unit, "goal": goal, "met": self.verdict}


@dataclass(frozen=True, slots=True)
class Section:
    """``raw``: every single measurement, as JSON takes it. ``notes``: what was left out and why."""

    figures: Sequence[Figure]
    raw: Mapping[str, Any]
    notes: Sequence[str] = field(default_factory=tuple)

    def as_json(self) -> dict[str, Any]:
        return {"figures": [figure.as_json() for figure in self.figures], "notes": list(self.notes), "raw": self.raw}


def text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(name: str, section: Section) -> str:
    """The section's figures as a Markdown table, notes below."""
    rows = [("figure", "value", "unit", "goal", "met"), ("---",) * 5]
    rows += [(f.name, text(f.value), f.unit, "" if f.goal is None else str(f.goal), f.verdict) for f in section.figures]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([f"\n## {name}\n", *lines, *(f"\n{note}" for note in section.notes)])


def median_ratio(pairs: Iterable[tuple[float, float]]) -> float:
    """Median of first over second: each pair was measured together, so what slowed one slowed the other."""
    return statistics.median(first / second for first, second in pairs)


def median_error(values: Sequence[float], draws: int = 1000) -> float:
    """The standard error of their median, by the bootstrap (Efron, 1979)."""
    rng = random.Random(0)
    return statistics.stdev(statistics.median(rng.choices(values, k=len(values))) for _ in range(draws))


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the least squares line through (x, y); 0 through fewer than two points."""
    return float(statistics.linear_regression(*zip(*points, strict=True)).slope) if len(points) > 1 else 0.0
