"""Jobs over HTTP, and when each of their tokens reached the client. Times are seconds of the wall clock, as logs have them."""

import asyncio
import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from benchmarks.api_overhead import parse

_POLL = 0.02


@dataclass(slots=True)
class Stream:
    """One job's events, as they came. The bytes are parsed later: the client's work is not the service's."""

    job_id: str
    arrivals: list[float] = field(default_factory=list)  #: of each token
    received: bytearray = field(default_factory=bytearray)

    @property
    def count(self) -> int:
        return len(self.arrivals)

    @property
    def tokens(self) -> list[int]:
        """Of a stream that came to its end. Raises SystemExit where one is missing."""
        return parse(bytes(self.received))

    def first_after(self, moment: float) -> float | None:
        """When the first token after ``moment`` came; None: none did."""
        index = bisect.bisect_right(self.arrivals, moment)
        return self.arrivals[index] if index < len(self.arrivals) else None


class Jobs:
    """Submits jobs and follows them; ``async with`` ends what is still followed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._http = httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False)
        self._followers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Jobs":
        return self

    async def __aexit__(self, *_: object) -> None:
        for follower in self._followers:
            follower.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)
        await self._http.aclose()

    async def start(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Stream]:
        """Greedy jobs of exactly ``max_tokens`` tokens, each followed from now on."""
        streams = await asyncio.gather(*(self._submit(prompt, max_tokens) for prompt in prompts))
        self._followers += [asyncio.create_task(self._follow(stream)) for stream in streams]
        return list(streams)

    async def finish(self) -> None:
        """Until every stream ended."""
        await asyncio.gather(*self._followers)
        self._followers.clear()

    async def until(self, streams: Sequence[Stream], counts: Sequence[int], timeout: float) -> None:
        """Until each stream has its count of tokens. Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            while any(stream.count < count for stream, count in zip(streams, counts, strict=True)):
                self._raise_failures()
                await asyncio.sleep(_POLL)

    async def cancel(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            (await self._http.post(f"/v1/jobs/{stream.job_id}/cancel")).raise_for_status()

    def _raise_failures(self) -> None:
        for follower in self._followers:
            if follower.done():
                follower.result()

    async def _submit(self, prompt: Sequence[int], max_tokens: int) -> Stream:
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = await self._http.post("/v1/jobs", json=body)
        answer.raise_for_status()
        return Stream(answer.json()["id"])

    async def _follow(self, stream: Stream) -> None:
        place = urlsplit(self._url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(f"GET /v1/jobs/{stream.job_id}/events HTTP/1.0\r\nHost: {place.hostname}\r\n\r\n".encode())
        try:
            while line := await reader.readline():
                stream.received += line
                if line == b"event: token\n":
                    stream.arrivals.append(time.time())
        finally:
            writer.close()
