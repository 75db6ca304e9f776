"""What the service costs: tok/s through the API and SSE, commits and checkpoints included, against the engine alone.

Both sides do the same work in one run: the same prompts, interleaved round by round, each side idle while the other works, in
alternating order. The tokens of both sides must be equal. ``python -m benchmarks.api_overhead --json out.json``
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

GOAL = 0.95


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Service:
    """``midsentence serve`` on a temporary directory."""

    def __init__(self, model: str, directory: Path) -> None:
        port, engine_port = free_port(), free_port()
        self.url, self.engine_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{engine_port}"
        command = [sys.executable, "-m", "service.cli", "serve", "--model", model, "--data-dir", str(directory / "state")]
        options = {"--port": port, "--engine-port": engine_port, "--device-pages": 1024, "--host-pages": 4096}
        flags = [str(part) for pair in options.items() for part in pair]
        self._run = directory / "state" / "run"
        self._log = (directory / "serve.log").open("wb")
        self._process = subprocess.Popen([*command, *flags], stdout=self._log, stderr=self._log)
        deadline = time.monotonic() + 120
        while not self._ready():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise SystemExit(f"the service did not start: see {directory / 'serve.log'}")
            time.sleep(0.1)

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=1.0).status_code == 200
        except httpx.HTTPError:
            return False

    def pid(self, role: str) -> int:
        return int((self._run / f"{role}.pid").read_text())

    def signal(self, number: signal.Signals) -> None:
        """To engine and api."""
        for role in ("engine", "api"):
            os.kill(self.pid(role), number)

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        self._log.close()


async def api_round(url: str, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds from the first submission to the last streamed token, and every job's tokens as its stream gave them."""
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(10.0, read=None)) as client:
        began = time.perf_counter()
        streams = await asyncio.gather(*(_stream(client, prompt, max_tokens) for prompt in prompts))
        seconds = time.perf_counter() - began
        return seconds, [parse(received) for received in streams]


async def _stream(client: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> bytes:
    """The bytes of a job's stream. They are parsed after the clock stopped: the client's work is not the service's."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = await client.post("/v1/jobs", json=body)
    answer.raise_for_status()
    url = client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(f"GET /v1/jobs/{answer.json()['id']}/events HTTP/1.0\r\nHost: {url.host}\r\n\r\n".encode())
    received = await reader.read()
    writer.close()
    return received


def parse(received: bytes) -> list[int]:
    """The tokens of a stream, after the check that each event follows the one before and that the last one is there."""
    tokens: list[int] = []
    event = ""
    for line in received.splitlines():
        if line.startswith(b"event: "):
            event = line[7:].decode().strip()
        elif line.startswith(b"data: ") and event == "token":
            data = json.loads(line[6:])
            if data["index"] != len(tokens):
                raise SystemExit(f"the stream gave token {data['index']} after {len(tokens)} tokens")
            tokens += data["token_ids"]
    if event != "done":
        raise SystemExit(f"a stream ended with {event!r}")
    return tokens


def engine_round(engine: "subprocess.Popen[str]", prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
    assert engine.stdin is not None
    assert engine.stdout is not None
    engine.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
    engine.stdin.flush()
    answer = json.loads(engine.stdout.readline())
    return answer["seconds"], answer["tokens"]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(arguments.seed)
    rounds = []
    with tempfile.TemporaryDirectory(prefix="midsentence-bench-") as name:
        engine = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bare_engine", arguments.model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        service = Service(arguments.model, Path(name))
        try:
            assert engine.stdout is not None
            engine.stdout.readline()
            for number in range(arguments.rounds + 1):
                prompts = [[rng.randrange(100, 20_000) for _ in range(arguments.prompt)] for _ in range(arguments.streams)]
                sides = {
                    "engine": lambda prompts=prompts: engine_round(engine, prompts, arguments.tokens),
                    "api": lambda prompts=prompts: asyncio.run(api_round(service.url, prompts, arguments.tokens)),
                }
                order = ["engine", "api"] if number % 2 else ["api", "engine"]
                results = {side: sides[side]() for side in order}
                if results["engine"][1] != results["api"][1]:
                    raise SystemExit("the two sides gave different tokens")
                if number:  # the first round warms both
                    rounds.append({side: arguments.streams * arguments.tokens / results[side][0] for side in order})
        finally:
            service.close()
            engine.terminate()
            engine.wait()
    medians = {side: statistics.median(r[side] for r in rounds) for side in ("engine", "api")}
    ratio = statistics.median(r["api"] / r["engine"] for r in rounds)
    return {"rounds": rounds, "median_tok_per_s": medians, "median_ratio": ratio, "goal": GOAL, "arguments": vars(arguments)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens of each job")
    parser.add_argument("--tokens", type=int, default=128, help="generated tokens of each job")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result here too")
    arguments = parser.parse_args()
    result = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2, default=str) + "\n")
    print(f"{arguments.streams} streams x {arguments.tokens} tokens, {arguments.rounds} rounds, {os.cpu_count()} cores")
    for r in result["rounds"]:
        print(f"  engine {r['engine']:7.1f} tok/s   api {r['api']:7.1f} tok/s   {r['api'] / r['engine']:.3f}")
    medians = result["median_tok_per_s"]
    print(f"median engine {medians['engine']:.1f}, api {medians['api']:.1f}, ratio {result['median_ratio']:.3f} (goal {GOAL})")
    return 0 if result["median_ratio"] >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
