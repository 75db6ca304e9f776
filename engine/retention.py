"""Host pages after their time: what nobody used for the retention time is given up, and what is free is zeroed.

Two halves, as for copies: the step loop decides (``HostCache.begin_erase``) and keeps the page held; a thread zeroes it and answers
with what failed. Nothing else can be in flight for such a page: it was free, so no entry names it and no copy pins it.

A few pages at a time, so that neither a job nor the disk notices. A page that was free when the process started may hold what a
crash left there, and nobody knows which do: each is read once, and zeroed where it is not zeros.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from engine.host_cache import HostCache
from engine.pools import HostPool

#: Once in this many seconds so many bytes, but never more than an eighth of the pool: while they are zeroed, pages are not free.
_PAUSE = 1.0
_BYTES = 32 << 20
_PART = 8


class Retention:
    """The step loop owns it. ``on_problem`` hears of ``erase_failed`` and why."""

    def __init__(
        self,
        host: HostCache,
        pool: HostPool,
        seconds: float,
        *,
        on_problem: Callable[[str, str], None] = lambda event, problem: None,
    ) -> None:
        self._host = host
        self._pool = pool
        self._seconds = seconds
        self._on_problem = on_problem
        self._limit = max(1, min(_BYTES // pool.geometry.page_bytes, host.manager.total_pages // _PART))
        self._next = host.clock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="erase")
        self._erasing: list[tuple[int, Future[None]]] = []

    def sweep(self) -> None:
        """Between two steps: apply what was zeroed; begin with the next few when it is time."""
        self._erasing = [(page, future) for page, future in self._erasing if not self._apply(page, future)]
        now = self._host.clock()
        if self._erasing or now < self._next:
            return
        self._next = now + _PAUSE
        pages = self._host.begin_erase(self._seconds, self._limit)
        self._erasing = [(page, self._thread.submit(self._pool.backing.zero_page, page)) for page in pages]

    def close(self) -> None:
        """Let the pages in flight become zeros."""
        self._thread.shutdown()

    def _apply(self, page: int, future: Future[None]) -> bool:
        """False while it is in flight. What is no failure of the disk is our bug, and ends the loop as it would there."""
        if not future.done():
            return False
        try:
            future.result()
        except OSError as error:
            self._on_problem("erase_failed", str(error))
            self._host.complete_erase(page, ok=False)
        else:
            self._host.complete_erase(page, ok=True)
        return True
