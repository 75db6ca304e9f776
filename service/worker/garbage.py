"""Python's garbage collector in an engine."""

import gc


def settle() -> None:
    """What was made until now stays: never walk its hundreds of thousands of objects again, in the middle of a step."""
    gc.collect()
    gc.freeze()
    gc.collect()  # the collector learns how few there are beside them
