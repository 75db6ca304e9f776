"""The named points of the product, by what reaches them, and how often each must fire for a run to be proof."""

from collections import Counter
from collections.abc import Iterable

from storage.failpoints import FAILPOINTS

#: In a whole run of the tiers ``ci`` and ``soak`` each point fires at least so often.
FEWEST = 5
#: The points of the api; behind a take over, when it is the one who watches.
API_POINTS = ("submit.before_send", "submit.after_reply", "cancel.after_reply", "take_over.after")
#: The points of the step loop.
WORKER_POINTS = ("worker.after_claim", "worker.after_step", "worker.before_commit", "worker.after_commit")
#: The points of the copies and the caches.
PAGE_POINTS = (
    "swap.before_out",
    "swap.after_out",
    "swap.before_in",
    "swap.after_in",
    "evict.before",
    "evict.after",
    "cow.before",
    "cow.after",
    "prefix.before_publish",
    "prefix.after_publish",
)
ALL_POINTS = (*FAILPOINTS, *WORKER_POINTS, *PAGE_POINTS)
#: The points around a durable write: those of storage/, of checkpoints, of the step loop.
POINTS = (*(point for point in FAILPOINTS if point not in API_POINTS), "swap.before_out", "swap.after_out", *WORKER_POINTS)
#: Reached in a drain only.
DRAIN_POINTS = ("release.before",)
#: Reached once in a life, or for certain only once.
ONCE_POINTS = (*DRAIN_POINTS, "register.after", "pool.before_zero")


def count_points(lines: Iterable[str]) -> Counter[str]:
    """Of lines ``name action pid``: how often each point did something. One that only slept has tried nothing by that."""
    fired = [line.split() for line in lines]
    return Counter(name for name, action, _ in fired if action != "sleep")


def rare_points(counts: Counter[str]) -> dict[str, int]:
    """The points that fired too rarely, with how often they did."""
    return {point: counts[point] for point in ALL_POINTS if counts[point] < FEWEST}
