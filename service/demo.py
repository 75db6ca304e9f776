"""``midsentence demo``: two jobs, uninterrupted and with each process killed in their midst; all must give the same tokens.

Everything here is seen from outside: over HTTP, by signals, by pid files.
"""

import queue
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from service.client import Event, JobClient
from service.demo_stage import DemoFailed, Stage, stage
from service.demo_view import DemoView
from service.processes import Exit

MAX_TOKENS = 96
PROMPT = "Tell me a story about an old lighthouse keeper."
_KILL_BETWEEN = (0.3, 0.6)  #: at a random point of this part of the text
_TRIES = 3
_ROUND_WITHIN = 600.0

#: name -> how the tokens are chosen. Both run in each round, and both streams are open when the kill comes.
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "seed": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 20_260_214},
}
#: process -> (what is shown of it, which stream is shown)
VICTIMS: dict[str, tuple[str, str]] = {
    "engine": ("the engine, which holds the model and all KV pages", "greedy"),
    "api": ("the API, and with it every open connection", "seeded"),
    "redis": ("Redis, which holds the jobs and the token log", "greedy"),
}


@dataclass(slots=True)
class Stream:
    """What one client saw of one job."""

    sampling: str
    job_id: str
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    lost: int = 0  #: how often its connection broke
    ended: str = ""
    failure: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One round: what the clients saw, and what the server says afterwards."""

    streams: dict[str, Stream]
    jobs: dict[str, dict[str, Any]]
    killed_at: dict[str, int]  #: tokens seen when the kill came; empty without a kill


def run(model: str, keep: Path | None) -> int:
    """Exit code 0 only when every token of every round is that of the uninterrupted one. Raises ServiceError."""
    view = DemoView()
    view.say("Midsentence: two jobs, one greedy and one sampled with a seed. First in peace, then with kill -9.", "bold")
    view.say(f"Prompt: {PROMPT}", "dim")
    with stage(model, keep) as server, JobClient(server.url) as client:
        _wait(server, view)
        good = _show(server, client, view)
        if not good:
            raise DemoFailed("the runs differ: this must never happen", "please report it, with the logs")
    view.say("")
    view.say(
        f"All {len(VICTIMS) * len(SAMPLINGS)} interrupted runs gave the tokens of the uninterrupted ones, each exactly once.",
        "bold green",
    )
    return Exit.OK


def _wait(server: Stage, view: DemoView) -> None:
    began = time.monotonic()
    view.say("Starting the server (the first time it also converts the model and compiles its kernels) ...", "dim")
    view.begin_wait()
    server.wait_until_ready(lambda _why: view.tick())
    view.end_wait()
    view.say(f"Ready after {time.monotonic() - began:.1f} s; its dashboard is at {server.url}", "dim")


def _show(server: Stage, client: JobClient, view: DemoView) -> bool:
    view.headline("1. Uninterrupted: what the text should be")
    reference = Round(server, client, view, shown="greedy").play()
    good = _judge(view, reference, reference)
    for number, (victim, (what, shown)) in enumerate(VICTIMS.items(), 2):
        view.headline(f"{number}. The same jobs again; kill {what}")
        good = _judge(view, _until_hit(server, client, view, victim, shown), reference) and good
    return good


def _until_hit(server: Stage, client: JobClient, view: DemoView, victim: str, shown: str) -> Outcome:
    """A kill that came too late shows nothing: do it again."""
    for _ in range(_TRIES):
        outcome = Round(server, client, view, shown=shown, victim=victim).play()
        if missed := _missed(outcome, victim):
            view.say(f"The kill missed ({missed}); again.", "yellow")
            continue
        return outcome
    raise DemoFailed(f"{_TRIES} kills of the {victim} all missed the jobs", "is the machine very slow or very fast?")


def _missed(outcome: Outcome, victim: str) -> str:
    """Why this kill proved nothing; empty when it hit both jobs in progress."""
    for name, stream in outcome.streams.items():
        if outcome.killed_at.get(name, MAX_TOKENS) >= MAX_TOKENS:
            return f"the {name} job was done already"
        if victim == "engine" and not outcome.jobs[name]["recovery"]["count"]:
            return f"the {name} job was not in the engine"
        if victim == "api" and not stream.lost:
            return f"the {name} stream never broke"
    return ""


class Round:
    """Both jobs from submission to end, with at most one kill."""

    def __init__(self, server: Stage, client: JobClient, view: DemoView, *, shown: str, victim: str = "") -> None:
        self._server = server
        self._client = client
        self._view = view
        self._shown = shown
        self._victim = victim
        self._kill_at = int(random.uniform(*_KILL_BETWEEN) * MAX_TOKENS)
        self._events: queue.SimpleQueue[tuple[Stream, Event | None]] = queue.SimpleQueue()
        self._killed_at: dict[str, int] = {}
        self._killed_pid = 0
        self._streams: dict[str, Stream] = {}

    def play(self) -> Outcome:
        for name, sampling in SAMPLINGS.items():
            body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": MAX_TOKENS, "ignore_eos": True, **sampling}
            self._streams[name] = Stream(name, self._client.submit(body))
        for stream in self._streams.values():
            threading.Thread(target=self._follow, args=(stream,), name=stream.sampling, daemon=True).start()
        self._view.begin_text()
        self._watch()
        jobs = {name: self._client.job(stream.job_id) for name, stream in self._streams.items()}
        return Outcome(self._streams, jobs, self._killed_at)

    def _follow(self, stream: Stream) -> None:
        try:
            with JobClient(self._server.url) as client:
                for event in client.follow(stream.job_id):
                    self._events.put((stream, event))
        except BaseException as error:  # shown by the main thread
            stream.failure = error
        self._events.put((stream, None))

    def _watch(self) -> None:
        deadline = time.monotonic() + _ROUND_WITHIN
        open_streams = len(self._streams)
        while open_streams:
            if time.monotonic() >= deadline:
                raise DemoFailed(f"the jobs did not end within {_ROUND_WITHIN:.0f} s")
            try:
                stream, event = self._events.get(timeout=0.1)
            except queue.Empty:
                self._view.tick()
                continue
            if event is None:
                open_streams -= 1
                if stream.failure is not None:
                    raise stream.failure
                continue
            self._take(stream, event)
            if self._victim and not self._killed_at and all(len(s.tokens) >= self._kill_at for s in self._streams.values()):
                self._kill()

    def _take(self, stream: Stream, event: Event) -> None:
        if event.kind == "lost":
            stream.lost += 1
        elif event.kind == "token":
            if stream.sampling == self._shown:
                if self._killed_at and len(stream.tokens) == self._killed_at[self._shown]:
                    self._view.resumed(time.monotonic() - stream.arrivals[-1])
                self._view.token(event.data["text"])
            stream.tokens += event.data["token_ids"]
            stream.arrivals.append(time.monotonic())
        elif event.kind in ("done", "failed", "cancelled"):
            stream.ended = event.kind

    def _kill(self) -> None:
        self._drain_queue()
        self._killed_at = {name: len(stream.tokens) for name, stream in self._streams.items()}
        self._killed_pid = self._server.kill(self._victim)
        self._view.killed(self._victim, self._killed_pid, self._killed_at[self._shown])

    def _drain_queue(self) -> None:
        """Count what has arrived already, so that the pause begins where it did."""
        later: list[tuple[Stream, Event | None]] = []
        while not self._events.empty():
            stream, event = self._events.get()
            if event is not None and event.kind == "token":
                self._take(stream, event)
            else:
                later.append((stream, event))
        for item in later:
            self._events.put(item)


def _judge(view: DemoView, outcome: Outcome, reference: Outcome) -> bool:
    """Every promise, one line each; whether all held."""
    good = True
    for name, stream in outcome.streams.items():
        job = outcome.jobs[name]
        expected: Sequence[int] = reference.jobs[name]["output"]["token_ids"]
        # The client itself refuses an index that is not the next one, so what it holds is gapless from 0 on.
        complete = len(stream.tokens) == MAX_TOKENS and stream.ended == "done"
        same = stream.tokens == expected == job["output"]["token_ids"]
        good = good and complete and same
        recovery = job["recovery"]
        text = (
            f"{name}: {len(stream.tokens)} tokens, none lost, none repeated" if complete else f"{name}: {len(stream.tokens)} tokens"
        )
        if outcome is not reference:
            text += ", identical to the uninterrupted run" if same else ", NOT the tokens of the uninterrupted run"
        if recovery["count"]:
            text += f"; {recovery['pages_restored']} pages restored, {recovery['tokens_replayed']} tokens replayed"
        elif stream.lost:
            text += "; the client resumed with Last-Event-ID"
        elif outcome.killed_at:
            text += "; the engine waited with all its pages"
        view.check(complete and same, text)
    return good
