"""What an open dashboard costs: tok/s of the service with viewers and without, in turns, and what one look takes the step loop.

A viewer does what the page does: it follows the overview, asks for the list of jobs every two seconds, and follows one job's text.
``python -m benchmarks.dashboard --json out.json``
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from benchmarks.api_overhead import Service
from benchmarks.harness import Subject
from engine.model_source import resolve
from engine.page_map import page_map
from engine.pools import HostPool, MemoryBacking

JOBS, TOKENS, VIEWERS = 8, 96, 3
BODY = {"prompt": "Tell me a story about an old lighthouse keeper.", "max_tokens": TOKENS, "ignore_eos": True}


@contextmanager
def viewer(url: str) -> Iterator[None]:
    stopping = threading.Event()

    def follow(path: str) -> None:
        with httpx.Client(base_url=url, timeout=30, trust_env=False) as client, client.stream("GET", path) as stream:
            for _ in stream.iter_lines():
                if stopping.is_set():
                    return

    def poll() -> None:
        with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
            while not stopping.wait(2.0):
                jobs = client.get("/v1/jobs", params={"limit": 20}).json()["data"]
                if running := [job["id"] for job in jobs if job["status"] == "in_progress"]:
                    follow(f"/v1/jobs/{running[0]}/events")

    threads = [threading.Thread(target=follow, args=["/v1/overview/events"]), threading.Thread(target=poll)]
    for thread in threads:
        thread.start()
    time.sleep(2.5)  # until the engine has noticed
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join(30)


def tokens_per_second(client: httpx.Client, seed: int) -> float:
    began = time.perf_counter()
    ids = [client.post("/v1/jobs", json=BODY | {"seed": seed * JOBS + i}).json()["id"] for i in range(JOBS)]
    for job_id in ids:
        with client.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
            for _ in stream.iter_lines():
                pass
    return JOBS * TOKENS / (time.perf_counter() - began)


def service_with_and_without(model: str, rounds: int) -> dict[str, object]:
    speeds: dict[str, list[float]] = {"alone": [], "watched": []}
    with tempfile.TemporaryDirectory() as directory:
        service = Service(model, Path(directory))
        try:
            with httpx.Client(base_url=service.url, timeout=600, trust_env=False) as client:
                tokens_per_second(client, 0)  # warm
                for number in range(1, rounds + 1):
                    # Who goes first changes, so that neither always finds the machine as the other left it.
                    for side in ("alone", "watched") if number % 2 else ("watched", "alone"):
                        with ExitStack() as stack:
                            for _ in range(VIEWERS if side == "watched" else 0):
                                stack.enter_context(viewer(service.url))
                            speeds[side].append(tokens_per_second(client, number))
        finally:
            service.close()
    medians = {side: statistics.median(values) for side, values in speeds.items()}
    return {"viewers": VIEWERS, "tok_per_s": speeds, "median": medians, "ratio": medians["watched"] / medians["alone"]}


def one_look(model: str, pages: int) -> dict[str, float]:
    """Microseconds for the maps of a device pool of ``pages`` pages and of its host pool, both full of cached pages."""
    subject = Subject.load(resolve(model))
    device = subject.pool(pages)
    host = HostPool(pages, device.geometry, MemoryBacking(pages, device.geometry.page_bytes))
    residency = subject.residency(device, host)
    try:
        manager, found = residency.cache.gpu_manager, residency.host
        assert found is not None
        for page in manager.allocate(pages - 1, "filler"):
            residency.prefix.insert(str(page), page)
            copy = found.prepare_store(str(page), "filler") if found.free_count else None
            if copy is not None:
                found.complete_store(copy, 0)
        times = []
        for _ in range(200):
            began = time.perf_counter()
            seen = page_map(residency, ())
            times.append(time.perf_counter() - began)
        assert len(seen.device) == len(seen.host) == pages
        return {"pages": pages, "microseconds": 1e6 * statistics.median(times)}
    finally:
        residency.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {
        "look": [one_look(arguments.model, pages) for pages in (256, 1024)],
        "service": service_with_and_without(arguments.model, arguments.rounds),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text)


if __name__ == "__main__":
    main()
