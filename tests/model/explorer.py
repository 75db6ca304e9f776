"""Every state of a ``World`` that can be reached, each once, breadth first: a violation comes with a shortest way to it."""

import random
from collections import deque
from dataclasses import dataclass

from tests.model.world import Violation, World

_SETTLED_EVERY = 20  #: states between those from which the world is let run to its end


@dataclass(frozen=True)
class Found:
    states: int
    violation: str = ""
    path: tuple[str, ...] = ()


def explore(world: World, limit: int = 1_000_000) -> Found:
    """Stops at the first violation, or raises when there are more than ``limit`` states."""
    ways = {world.key(): (None, "")}
    waiting, visited = deque([world]), 0
    while waiting:
        here = waiting.popleft()
        key = here.key()
        visited += 1
        if visited % _SETTLED_EVERY == 0 or not any(vars(here.budget).values()):
            try:
                here.clone().settle()
            except Violation as violation:
                return Found(len(ways), str(violation), _path(ways, key))
        for name, move in here.moves():
            there = here.clone()
            try:
                move(there)
                there.check(here)
            except Violation as violation:
                return Found(len(ways), str(violation), (*_path(ways, key), name))
            following = there.key()
            if following not in ways:
                if len(ways) >= limit:
                    raise AssertionError(f"more than {limit} states")
                ways[following] = key, name
                waiting.append(there)
    return Found(len(ways))


def walk(world: World, rng: random.Random, steps: int) -> list[str]:
    """A random way through the world: the names of its moves. ``world`` is moved."""
    names = []
    for _ in range(steps):
        moves = list(world.moves())
        if not moves:
            break
        name, move = rng.choice(moves)
        earlier = world.clone()
        move(world)
        world.check(earlier)
        names.append(name)
    return names


def _path(ways, key) -> tuple[str, ...]:
    names = []
    while key is not None:
        key, name = ways[key]
        names.append(name)
    return tuple(reversed(names[:-1]))
