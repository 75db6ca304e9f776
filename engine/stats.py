"""What happened to pages since the start, in plain counters."""

from dataclasses import dataclass


@dataclass(slots=True)
class PageStats:
    """Pages, unless said otherwise."""

    found_on_device: int = 0  #: at an admission, of the Sequence's full pages
    found_on_host: int = 0
    missing: int = 0  #: full prompt pages found nowhere: computed
    faults: int = 0  #: needed for tokens that a Sequence has, and not on the device when it got its place
    read: int = 0  #: by attention, once for each step
    stored: int = 0  #: checkpointed: copied to the host pool because they were sealed
    swapped_out: int = 0  #: copied at a preemption, because the host pool did not have them
    swapped_in: int = 0
    unbacked: int = 0  #: sealed, but no free host page: computed again when they are wanted again
    copied_on_write: int = 0
    copies_failed: int = 0
    verify_failures: int = 0
    out_seconds: float = 0.0  #: that copies to the host took, beside the steps
    in_seconds: float = 0.0
    stall_seconds: float = 0.0  #: that the loop waited for copies because nothing could be computed
