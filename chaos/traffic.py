"""The load: clients with an open stream each, all the time, until told to stop; and a poller that looks at jobs from aside."""

import threading
import time
from collections.abc import Callable, Sequence
from random import Random
from types import TracebackType
from typing import Self

from chaos.client import Client
from chaos.history import History
from chaos.workload import Case

_POLL_PAUSE = 0.15


class Traffic:
    """``cases`` are drawn at random for ever, some of them twice at once; or each once, in order, when ``once`` is given."""

    def __init__(
        self,
        url: str,
        cases: Sequence[Case],
        history: History,
        rng: Random,
        *,
        clients: int = 8,
        once: bool = False,
        cancel_share: float = 0.1,
        reread_share: float = 0.15,
        twin_share: float = 0.25,
        patience: float = 120.0,
    ) -> None:
        self._url = url
        self._cases = tuple(cases)
        self._history = history
        self._cancel_share = cancel_share
        self._reread_share = reread_share
        self._twin_share = twin_share
        self._patience = patience
        self._lock = threading.Lock()
        self._queue = list(reversed(self._cases)) if once else None
        self._closing = threading.Event()
        self._halt = threading.Event()
        self.accepted: dict[str, str] = {}  #: job id -> name of its case
        self._live: set[str] = set()
        self._problems: list[BaseException] = []
        self._workers = [self._thread(f"c{n}", Random(rng.randrange(1 << 60)), self._work) for n in range(clients)]
        self._poller = self._thread("poller", Random(rng.randrange(1 << 60)), self._poll)

    def _thread(self, name: str, rng: Random, target: Callable[[str, Random], None]) -> threading.Thread:
        def run() -> None:
            try:
                target(name, rng)
            except BaseException as error:  # a client of ours that dies would look like a quiet service
                self._problems.append(error)

        return threading.Thread(target=run, name=name, daemon=True)

    def __enter__(self) -> Self:
        for thread in (*self._workers, self._poller):
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.set()
        self._halt.set()
        for thread in (*self._workers, self._poller):
            thread.join(30.0)

    def live_jobs(self) -> list[str]:
        with self._lock:
            return sorted(self._live)

    def drain(self, timeout: float) -> bool:
        """Submit no more; wait until every client saw the end of its job. Raises what a client of ours died of."""
        self._closing.set()
        deadline = time.monotonic() + timeout
        for thread in self._workers:
            thread.join(max(0.0, deadline - time.monotonic()))
        done = not any(thread.is_alive() for thread in self._workers)
        self._halt.set()
        self._poller.join(30.0)
        if self._problems:
            raise RuntimeError("a client of this driver died") from self._problems[0]
        return done

    # --- a client's life ----------------------------------------------------------------------------------------------

    def _next_case(self, rng: Random) -> Case | None:
        with self._lock:
            if self._queue is None:
                return None if self._closing.is_set() else rng.choice(self._cases)
            return self._queue.pop() if self._queue else None

    def _work(self, name: str, rng: Random) -> None:
        client = Client(name, self._url, self._history, rng, self._halt)
        while (case := self._next_case(rng)) is not None:
            # Two jobs of one prompt at once share its pages, the unfinished one too, until one of them writes.
            twins = self._queue is None and rng.random() < self._twin_share
            for job_id in [self._submit(client, case) for _ in range(2 if twins else 1)]:
                if job_id is not None:
                    self._see_through(client, name, rng, job_id, case)
        client.close()

    def _submit(self, client: Client, case: Case) -> str | None:
        job_id = client.submit(case, self._patience)
        if job_id is not None:
            with self._lock:
                self.accepted[job_id] = case.name
                self._live.add(job_id)
        return job_id

    def _see_through(self, client: Client, name: str, rng: Random, job_id: str, case: Case) -> None:
        cancel_after = rng.randrange(1, case.max_tokens) if rng.random() < self._cancel_share else None
        client.follow(job_id, reader=name, patience=self._patience, cancel_after=cancel_after)
        with self._lock:
            self._live.discard(job_id)
        seen = client.get(job_id).seen
        if seen is not None and rng.random() < self._reread_share:
            cursor = rng.choice([None, rng.randrange(len(seen.token_ids) + 1)])
            client.follow(job_id, reader=f"{name}-again", cursor=cursor, patience=self._patience)

    def _poll(self, name: str, rng: Random) -> None:
        client = Client(name, self._url, self._history, rng, self._halt)
        while not self._halt.wait(_POLL_PAUSE):
            jobs = self.live_jobs()
            if jobs:
                client.get(rng.choice(jobs))
        client.close()
