"""One measured process. It runs only while it is asked: between its turns it is stopped, so that nobody spins beside the others."""

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.peers.environments import Unavailable, last_line
from benchmarks.peers.protocol import Message

DISTURBED = 0.1  #: cores that other processes took during a measurement; beyond, it tells too little
ATTEMPTS = 3
TIMEOUT = 1200  #: seconds for loading, compilation included, and for one request
ROOT = Path(__file__).parents[2]
#: Importing ``engine`` sets it for our own process; every peer has its own library's default.
NOT_INHERITED = ("GOMP_SPINCOUNT",)


class Process:
    """``python -m module *arguments``, loaded and stopped. ``about`` is what it told of itself."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (close() closes it)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env={**environment, **variables},
            start_new_session=True,  # Ctrl-C is ours, and its own children are stopped with it
        )
        try:
            self.about = self._receive()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def ask(self, request: Message) -> Message:
        """Its answer, with ``others``: cores that other processes took meanwhile, which is what disturbed it.

        Raises ``Unavailable`` when it failed or died.
        """
        assert self._process.stdin is not None
        began, busy = time.monotonic(), busy_seconds()
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Unavailable(self._last_words()) from None
        try:
            answer = self._receive()
        finally:
            self._signal(signal.SIGSTOP)
        others = busy_seconds() - busy - answer["cpu_seconds"]
        return {**answer, "others": max(0.0, others / (time.monotonic() - began))}

    def ask_in_peace(self, request: Callable[[int], Message]) -> Message:
        """The answer to ``request(attempt)``; again while others disturbed it, ``ATTEMPTS`` in all, of which the calmest counts."""
        answers: list[Message] = []
        while len(answers) < ATTEMPTS and (not answers or answers[-1]["others"] > DISTURBED):
            answers.append(self.ask(request(len(answers))))
        return min(answers, key=lambda answer: float(answer["others"]))

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._log):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):  # a request that nobody took
                    file.close()

    def _receive(self) -> Message:
        output = self._process.stdout
        assert output is not None
        ready, _, _ = select.select([output], [], [], TIMEOUT)
        if not ready:
            self._signal(signal.SIGKILL)  # a late answer would be taken for the next one
            raise Unavailable(f"no answer in {TIMEOUT} s")
        line = output.readline()
        if not line:
            raise Unavailable(self._last_words())
        answer: Message = json.loads(line)
        if "error" in answer:
            raise Unavailable(answer["error"])
        return answer

    def _last_words(self) -> str:
        """Of a process that closed its pipe: complete once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._log.seek(0)
        return f"died: {last_line(self._log.read())}"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # dead already, which the next answer shows
            os.killpg(self._process.pid, number)


def busy_seconds() -> float:
    """CPU seconds that all processes of this machine took since it started."""
    times = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = times[3] + times[4]
    return (sum(times) - idle) / os.sysconf("SC_CLK_TCK")
