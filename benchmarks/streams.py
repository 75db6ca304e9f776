"""What open streams cost the engine, and whether they are exact.

First every job has a stream of its own, all open from the start on one api process; some read nothing until the others are done.
Each stream must have exactly the tokens of its job. Then two services work through the same long jobs, one with a stream open for
each (most wait for their turn in silence), one with none. Their engines and apis take turns of two seconds, the others stopped, so
that both have the machine's fast and slow moments: tok/s by the engine's own counter. The clients work on the same cores.
``python -m benchmarks.streams --json out.json``
"""

import argparse
import asyncio
import json
import random
import selectors
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import httpx

from benchmarks.api_overhead import Service, parse
from benchmarks.durability.figures import median_error

GOAL = 0.95
_OPENING = 5.0  #: seconds in which all streams are open
_SETTLE = 0.2  #: seconds until a side that was stopped is at work again
_AT_ONCE = 50  #: submissions and connections being made at a time
_SLOW = 20  #: streams that are not read before all others have ended
Bodies = Sequence[dict[str, Any]]


async def exact(url: str, bodies: Bodies) -> int:
    """How many streams had exactly the tokens of their jobs: all, or it ends here."""
    async with httpx.AsyncClient(base_url=url, timeout=30.0) as client:
        ids = await _submit(client, bodies)
        streamed = await _stream_all(client.base_url, ids)
        tokens = [(await client.get(f"/v1/jobs/{job_id}")).json()["output"]["token_ids"] for job_id in ids]
    if streamed != tokens:
        raise SystemExit("a stream had other tokens than its job")
    return len(streamed)


async def speeds(silent: Service, watched: Service, bodies: Bodies, turns: int, seconds: float) -> list[tuple[float, float]]:
    """(tok/s with no stream, tok/s with all) of each pair of turns."""
    ids = await _submit_to(watched, bodies)
    await _submit_to(silent, bodies)
    readers = Readers(httpx.URL(watched.url), ids)
    await asyncio.sleep(_OPENING)
    if (count := _value(watched.url, "midsentence_open_streams")) != len(ids):
        raise SystemExit(f"{count:.0f} of {len(ids)} streams are open")
    sides = [silent, watched]
    for side in sides:
        side.signal(signal.SIGSTOP)
    found: list[tuple[float, float]] = []
    try:
        for turn in range(turns):
            rates = {side: await _turn(side, seconds) for side in (sides if turn % 2 else reversed(sides))}
            found.append((rates[silent], rates[watched]))
    finally:
        for side in sides:
            side.signal(signal.SIGCONT)
        readers.close()
    return found


async def _turn(side: Service, seconds: float) -> float:
    side.signal(signal.SIGCONT)
    await asyncio.sleep(_SETTLE)
    before, began = _tokens(side), time.perf_counter()
    await asyncio.sleep(seconds)
    after, ended = _tokens(side), time.perf_counter()
    side.signal(signal.SIGSTOP)
    return (after - before) / (ended - began)


async def _submit_to(service: Service, bodies: Bodies) -> list[str]:
    async with httpx.AsyncClient(base_url=service.url, timeout=30.0) as client:
        return await _submit(client, bodies)


class Readers(threading.Thread):
    """Clients that read what comes and forget it, as cheaply as can be: they work on the cores of what is measured."""

    def __init__(self, url: httpx.URL, ids: Sequence[str]) -> None:
        super().__init__(daemon=True)
        self._address = (url.host, url.port)
        self._ids = ids
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        buffer = bytearray(1 << 16)
        with selectors.DefaultSelector() as selector:
            for job_id in self._ids:
                connection = socket.create_connection(self._address)
                connection.sendall(f"GET /v1/jobs/{job_id}/events HTTP/1.0\r\nHost: {self._address[0]}\r\n\r\n".encode())
                selector.register(connection, selectors.EVENT_READ)
            while not self._ended.is_set():
                for key, _ in selector.select(0.5):
                    connection = cast("socket.socket", key.fileobj)
                    if not connection.recv_into(buffer):
                        selector.unregister(connection)
                        connection.close()
            for key in list(selector.get_map().values()):
                cast("socket.socket", key.fileobj).close()

    def close(self) -> None:
        self._ended.set()
        self.join()


def _tokens(service: Service) -> float:
    return _value(service.engine_url, "midsentence_generation_tokens_total")


def _value(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=10.0, trust_env=False, verify=False).text.splitlines()
    return next(float(line.removeprefix(f"{name} ")) for line in lines if line.startswith(f"{name} "))


async def _submit(client: httpx.AsyncClient, bodies: Bodies) -> list[str]:
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(body: dict[str, Any]) -> str:
        async with gate:
            answer = await client.post("/v1/jobs", json=body)
            answer.raise_for_status()
            return str(answer.json()["id"])

    return list(await asyncio.gather(*map(one, bodies)))


async def _stream_all(url: httpx.URL, ids: Sequence[str]) -> list[list[int]]:
    gate, others_done = asyncio.Semaphore(_AT_ONCE), asyncio.Event()

    async def read(job_id: str, slow: bool) -> bytes:
        async with gate:
            reader, writer = await asyncio.open_connection(url.host, url.port, limit=1 << 12)
            writer.write(f"GET /v1/jobs/{job_id}/events HTTP/1.0\r\nHost: {url.host}\r\n\r\n".encode())
        if slow:
            await others_done.wait()
        received = await reader.read()
        writer.close()
        return received

    slow = [asyncio.create_task(read(job_id, True)) for job_id in ids[:_SLOW]]
    quick = await asyncio.gather(*(read(job_id, False) for job_id in ids[_SLOW:]))
    others_done.set()
    return [parse(received) for received in [*await asyncio.gather(*slow), *quick]]


def resident(pid: int) -> float:
    """MiB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


@contextmanager
def _service(model: str) -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="midsentence-bench-") as name:
        service = Service(model, Path(name))
        try:
            yield service
        finally:
            service.close()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(arguments.seed)

    def bodies(tokens: int) -> list[dict[str, Any]]:
        asked = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return [{"prompt": [rng.randrange(100, 20_000) for _ in range(16)], **asked} for _ in range(arguments.streams)]

    with ExitStack() as stack:
        silent, watched = (stack.enter_context(_service(arguments.model)) for _ in range(2))
        memory = [resident(watched.pid("api"))]
        equal = asyncio.run(exact(watched.url, bodies(arguments.short)))
        memory.append(resident(watched.pid("api")))
        pairs = asyncio.run(speeds(silent, watched, bodies(arguments.long), arguments.turns, arguments.seconds))
        memory.append(resident(watched.pid("api")))
    ratios = [with_streams / without for without, with_streams in pairs]
    return {
        "exact_streams": equal,
        "turns": pairs,
        "median_ratio": statistics.median(ratios),
        "standard_error": median_error(ratios),
        "goal": GOAL,
        "api_mib": memory,  #: at the start, after the streams that ended, after the turns
        "arguments": vars(arguments),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--short", type=int, default=16, help="tokens of the jobs whose streams are compared")
    parser.add_argument("--long", type=int, default=300, help="tokens of the jobs that are worked on in turns: enough for all")
    parser.add_argument("--turns", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn: far less than a lease")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result here too")
    arguments = parser.parse_args()
    result = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2, default=str) + "\n")
    print(f"{result['exact_streams']} streams had exactly their jobs' tokens, {_SLOW} of them read last")
    without, with_streams = (statistics.median(side) for side in zip(*result["turns"], strict=True))
    print(f"no stream {without:.1f} tok/s, {arguments.streams} streams {with_streams:.1f} tok/s in the median")
    print("api, MiB: at the start, after the streams, after the turns:", *(f"{mib:.0f}" for mib in result["api_mib"]))
    ratio = f"{result['median_ratio']:.3f} ± {result['standard_error']:.3f}"
    print(f"median ratio of {arguments.turns} pairs of turns {ratio} (goal {GOAL})")
    return 0 if result["median_ratio"] >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
