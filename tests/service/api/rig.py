"""An api on loopback, a scripted engine that writes through the job store, and clients: everything but a model."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry

from service.api.context import ApiOptions, Context, ServedModel
from service.api.server import ApiServer
from service.api_keys import ApiKeys
from service.listening import bind
from service.tokenization import Tokenization
from storage import chain
from storage.job_spec import JobSpec
from storage.job_store import JobStore
from storage.records import (
    Commit,
    EngineInfo,
    Finish,
    JobError,
    JobStatus,
    LogEntry,
    OwnedJob,
    StepAnswers,
    StepWrites,
)

#: For httpx: no proxy; and no TLS context, which takes longer to make than most tests.
DIRECT: dict[str, bool] = {"trust_env": False, "verify": False}
ENDING: list[threading.Thread] = []
QUICK = {"sweep_interval": 0.1, "submit_timeout": 1.0, "poll_interval": 0.1, "drain_seconds": 0.0, "close_seconds": 1}
MODEL, FINGERPRINT = "tiny", "f" * 32
PROMPT = [5, 6, 7, 8]


class Source:
    """A store that may not be open yet, or may be refused."""

    def __init__(self, store: JobStore, error: Exception | None) -> None:
        self.store = store
        self.error = error

    def __call__(self) -> JobStore:
        if self.error is not None:
            raise self.error
        return self.store


@dataclass
class Api:
    server: ApiServer
    context: Context
    source: Source
    url: str
    client: httpx.Client
    thread: threading.Thread
    loop: list[asyncio.AbstractEventLoop] = field(default_factory=list)

    def drain(self) -> None:
        self.loop[0].call_soon_threadsafe(self.server.begin_drain)

    def retire(self) -> None:
        self.loop[0].call_soon_threadsafe(self.server.retire)

    def submit(self, **body: object) -> str:
        answer = self.client.post("/v1/jobs", json={"prompt": PROMPT, "max_tokens": 64, **body})
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def job(self, job_id: str) -> dict:
        return self.client.get(f"/v1/jobs/{job_id}").json()

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"midsentence_{name}"))


def served_model(folder: Path) -> ServedModel:
    return ServedModel((MODEL, "tiny-alias"), FINGERPRINT, Tokenization(folder))


@contextmanager
def running_api(
    store: JobStore,
    model: ServedModel,
    error: Exception | None = None,
    keys: ApiKeys | None = None,
    *,
    kill_engine: Callable[[], None] | None = None,
    close_loop: bool = True,
    **options: object,
) -> Iterator[Api]:
    """``close_loop``: not where a client is left that never reads, for a loop does not close with its connection open."""
    source = Source(store, error)
    settings = ApiOptions(**{**QUICK, **options})  # type: ignore[arg-type]
    context = Context(model, source, settings, CollectorRegistry(), keys, kill_engine=kill_engine)
    sock = bind("127.0.0.1", 0)
    server = ApiServer(context)
    loop: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loop.append(asyncio.get_running_loop())
        await server.serve(sockets=[sock])

    def run() -> None:
        runner = asyncio.Runner(loop_factory=server.config.get_loop_factory())
        runner.run(serve())
        if close_loop:  # hundreds of them are made, each with descriptors of its own
            runner.close()

    thread = threading.Thread(target=run, daemon=True)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    thread.start()
    until(lambda: server.started)
    with httpx.Client(base_url=url, timeout=20, **DIRECT) as client:
        api = Api(server, context, source, url, client, thread, loop)
        try:
            until(lambda: context.view is not None)
            yield api
        finally:
            # An end takes uvicorn 0.3 s; 150 tests need not wait for each. ``all_ended`` looks at the end of the session.
            if thread.is_alive():
                api.drain()
            ENDING.append(thread)


def all_ended() -> bool:
    deadline = time.monotonic() + 20
    for thread in ENDING:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in ENDING)


def until(condition, seconds: float = 30.0):
    """Wait for ``condition()`` to be true, and answer with it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("waited in vain")


class Gone(LookupError):
    """A job was deleted after it had been claimed."""


class ScriptedEngine:
    """Claims jobs and commits the tokens it is told to: token i of a job is 100 + i, its text "ti "."""

    def __init__(self, store: JobStore, engine_id: str = "engine-1", *, device_pages: int = 64, max_context: int = 512) -> None:
        self.store = store
        self.info = EngineInfo(
            engine_id=engine_id,
            boot_id="boot",
            host="here",
            pid=1,
            pool_id=f"pool-{engine_id}",
            model_fingerprint=FINGERPRINT,
            model_name=MODEL,
            page_size=16,
            device_pages=device_pages,
            max_context=max_context,
        )
        self.held: dict[str, OwnedJob] = {}
        self.lives = 0
        self.register()

    @property
    def incarnation(self) -> str:
        return f"{self.info.engine_id}-life-{self.lives}"

    def register(self) -> None:
        """Also a crash: the next life of the same engine takes its jobs up again."""
        self.lives += 1
        answer = self.store.register(self.info, self.incarnation, blame=False)
        self.held = {job.job_id: job for job in answer.owned}

    def beat(self) -> None:
        self.store.renew(self.info.engine_id, self.incarnation)

    def tell(self, device: str, host: str = "", **totals: float) -> int:
        """How it does, to whoever listens."""
        names = ("tokens", "steps", "step_seconds", "gaps", "gap_seconds", "recovered", "pages_restored", "tokens_replayed")
        vitals = {
            "engine_id": self.info.engine_id,
            "incarnation": self.incarnation,
            "clock": time.monotonic(),
            "running": len(self.held),
            "waiting": 0,
            "checkpoint_lag": 3,
            "totals": dict.fromkeys(names, 0) | totals,
            "device": device,
            "host": host,
        }
        return self.store.publish_vitals(json.dumps(vitals))

    def claim(self) -> list[str]:
        found = self.store.claim(self.info.engine_id, self.incarnation, held=list(self.held), free_pages=10_000, limit=64)
        self.held |= {job.job_id: job for job in found}
        return [job.job_id for job in found]

    def claim_one(self, job_id: str) -> None:
        until(lambda: job_id in self.held or job_id in self.claim())

    def write(self, *job_ids: str, tokens: int = 1, end: str = "", texts: list[str] | None = None, **counters: int) -> StepAnswers:
        """``end``: "" or the finish reason of the last token."""
        commits = [self._commit(job_id, tokens, end, texts, counters) for job_id in job_ids]
        writes = StepWrites(commits=tuple(commits))
        return self.store.write_step(self.info.engine_id, self.incarnation, self.info.pool_id, writes)

    def _commit(self, job_id: str, tokens: int, end: str, texts: list[str] | None, counters: dict[str, int]) -> Commit:
        record = self.store.get(job_id)
        if record is None:
            raise Gone(job_id)
        first = record.log_length
        asked = JobSpec.from_json(record.spec).logprobs is not None
        entries = tuple(
            LogEntry(100 + index, texts[index - first] if texts else text_of(index), logprobs_of(index) if asked else "")
            for index in range(first, first + tokens)
        )
        finish = None
        if end:
            status = JobStatus.INCOMPLETE if end == "length" else JobStatus.COMPLETED
            finish = Finish(status, end)
        return Commit(
            job_id=job_id,
            fence=self.held[job_id].fence,
            expected=first,
            chain=chain.extend_all(record.chain, [entry.token for entry in entries]),
            tokens=entries,
            finish=finish,
            **counters,
        )

    def say(self, job_id: str, pieces: list[tuple[int, str]], end: str = "stop") -> None:
        """All of an answer: its tokens and what each shows."""
        record = self.store.get(job_id)
        assert record is not None
        entries = tuple(LogEntry(token, text, logprobs_of(index)) for index, (token, text) in enumerate(pieces))
        chained = chain.extend_all(record.chain, [entry.token for entry in entries])
        finish = Finish(JobStatus.INCOMPLETE if end == "length" else JobStatus.COMPLETED, end)
        commit = Commit(job_id, self.held[job_id].fence, record.log_length, chained, entries, finish)
        self.store.write_step(self.info.engine_id, self.incarnation, self.info.pool_id, StepWrites(commits=(commit,)))

    def fail(self, job_id: str, code: str, message: str) -> None:
        record = self.store.get(job_id)
        assert record is not None
        commit = Commit(
            job_id=job_id,
            fence=self.held[job_id].fence,
            expected=record.log_length,
            chain=record.chain,
            finish=Finish(JobStatus.FAILED, error=JobError(code, message)),
        )
        self.store.write_step(self.info.engine_id, self.incarnation, self.info.pool_id, StepWrites(commits=(commit,)))


def text_of(index: int) -> str:
    return f"t{index} "


def logprobs_of(index: int) -> str:
    return f'{{"token":{100 + index},"logprob":-0.5,"top":[[{100 + index},-0.5],[7,-1.5]]}}'


@dataclass
class Event:
    id: str
    name: str
    data: dict


class Stream:
    """A client of one event stream: reads in a thread, keeps what it saw."""

    def __init__(self, api: Api, job_id: str, last_event_id: str | None = None) -> None:
        self.events: list[Event] = []
        self.error: Exception | None = None
        self.status = 0
        self.ended = threading.Event()
        self._headers = {"Last-Event-ID": last_event_id} if last_event_id is not None else {}
        self._url = f"{api.url}/v1/jobs/{job_id}/events"
        self._stop = False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            with (
                httpx.Client(timeout=30, **DIRECT) as client,
                client.stream("GET", self._url, headers=self._headers) as response,
            ):
                self.status = response.status_code
                for event in parse_events(response.iter_lines()):
                    self.events.append(event)
                    if self._stop:
                        return
        except Exception as error:
            self.error = error
        finally:
            self.ended.set()

    def close(self) -> None:
        """Goes away at the next event."""
        self._stop = True

    @property
    def tokens(self) -> list[int]:
        return [event.data["token_ids"][0] for event in self.events if event.name == "token"]

    @property
    def names(self) -> list[str]:
        return [event.name for event in self.events if event.name != "token"]

    def wait(self, seconds: float = 30.0) -> "Stream":
        assert self.ended.wait(seconds), f"stream still open after {len(self.events)} events"
        assert self.error is None, self.error
        return self


def parse_events(lines) -> Iterator[Event]:
    """By the rules of the standard, so that the tests do not trust the parser of a library."""
    fields: dict[str, str] = {}
    for line in lines:
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
        elif fields:
            data = fields.get("data", "")
            yield Event(fields.get("id", ""), fields.get("event", "message"), json.loads(data) if data != "[DONE]" else {})
            fields = {}


def collect(api: Api, job_id: str, last_event_id: str | None = None) -> list[Event]:
    """All events of a finished job."""
    return Stream(api, job_id, last_event_id).wait().events
