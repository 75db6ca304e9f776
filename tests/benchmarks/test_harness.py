"""Sides are measured in turns, and neither always goes first."""

from contextlib import contextmanager
from types import SimpleNamespace

from benchmarks.harness import in_turns


class Pedantic:
    """What ``in_turns`` uses of pytest-benchmark's fixture."""

    def __init__(self):
        self.extra_info = {}

    def pedantic(self, target, *, setup, teardown, rounds):
        for _ in range(rounds):
            args, kwargs = setup()
            target(*args, **kwargs)
            teardown(*args, **kwargs)


def test_every_side_has_its_rounds_in_alternating_order():
    benchmark, order, inside = Pedantic(), [], SimpleNamespace(count=0)

    @contextmanager
    def side(name):
        inside.count += 1
        assert inside.count == 1  # one at a time
        yield lambda: order.append(name) or len(order)
        inside.count -= 1

    others = {"theirs": lambda: side("theirs"), "third": lambda: side("third")}
    results = in_turns(benchmark, lambda: side("ours"), others, rounds=4)
    pairs = ["theirs", "third"]
    assert order == [*pairs, "ours", "ours", *pairs, *pairs, "ours", "ours", *pairs]
    assert results == {"ours": [3, 4, 9, 10], "theirs": [1, 5, 7, 11], "third": [2, 6, 8, 12]}
    assert {name: len(seconds) for name, seconds in benchmark.extra_info["seconds"].items()} == dict.fromkeys(results, 4)
    assert benchmark.extra_info["ratio"].keys() == {"theirs", "third"}
