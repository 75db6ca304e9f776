"""Redis' append-only file, which has no checksum, after anything may have happened to it.

The server or the store refuses, or what is read is an earlier moment as it was acknowledged; what is neither, the audit finds.
"""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from storage.audit import audit
from storage.errors import StorageError
from storage.job_spec import JobSpec
from storage.job_store import JobStore
from storage.records import Finish, JobStatus, LogRead
from storage.redis_store import RedisJobStore
from storage.store_file import StoreFile, judge
from tests.servers import DidNotStart, running_redis, valkey_binary
from tests.storage.backends import EngineUnderTest, submit

CUT_EVERY, CUTS = 64, 90
FLIPS = 60
JOBS = [f"job-{number}" for number in range(4)]

State = dict[str, object]


def state_of(store: JobStore) -> State:
    """All of every job that decides what a client or an engine gets; not the text beside a token, which no hash covers."""
    state: State = {}
    for job_id in JOBS:
        (piece,) = store.read([LogRead(job_id)])
        if piece is not None:
            record = piece.record
            tokens = tuple(entry.token for entry in piece.entries)
            state[job_id] = (record.spec, record.prompt_token_ids, record.status, record.finish_reason, tokens)
    return state


@dataclass
class Written:
    """A server's directory after its end, and every state that it acknowledged on the way."""

    directory: Path
    mark: StoreFile
    states: list[State]

    @property
    def log(self) -> str:
        (path,) = self.directory.glob("appendonlydir/*.incr.aof")
        return str(path.relative_to(self.directory))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    directory = tmp_path_factory.mktemp("written")
    states: list[State] = [{}]
    with running_redis(valkey_binary(), directory) as server:
        store = RedisJobStore(server.url, single_connection=True)
        store.bind(store.create("store-1"))
        engine = EngineUnderTest(store)
        engine.register()
        for number, job_id in enumerate(JOBS):
            submit(store, job_id, spec=JobSpec("demo", 100, number).to_json())
            states.append(state_of(store))
        engine.claim()
        states.append(state_of(store))
        store.cancel(JOBS[3])
        states.append(state_of(store))
        for step in range(30):  # the last one is acknowledged: whatever is cut off was promised
            job_id = JOBS[step % 3]
            engine.commit(job_id, 1000 + step, 2000 + step, finish=Finish(JobStatus.COMPLETED, "stop") if step == 27 else None)
            states.append(state_of(store))
        identity = store.identity()
        assert identity is not None
        store.close()
    return Written(directory, StoreFile("engine-1", identity.store_id, identity.epoch, identity.commit), states)


def outcome(written: Written, copy: Path, damage: Callable[[Path], None]) -> str:
    """What a start on a damaged copy comes to. AssertionError when something wrong is believed."""
    shutil.copytree(written.directory, copy)
    damage(copy)
    try:
        with running_redis(valkey_binary(), copy, ("--aof-load-truncated", "yes")) as server:
            return judged(written, RedisJobStore(server.url), server.url)
    except DidNotStart:
        return "the server refuses"
    finally:
        shutil.rmtree(copy)


def judged(written: Written, store: RedisJobStore, url: str) -> str:
    try:
        identity = store.identity()
        verdict = judge(written.mark, identity)
        if identity is None:
            assert verdict.refused
            return "the store is refused"
        store.bind(identity)
        found = state_of(store)
    except (StorageError, KeyError, ValueError):
        found = None  # a record that cannot be read: the audit must say so
    finally:
        store.close()
    if audit(url):
        return "the audit finds it"
    assert found in written.states, "neither refused, nor found by the audit, nor a moment that was"
    if verdict.refused:
        return "the store is refused"
    assert found == written.states[-1], "acknowledged writes are gone, and nobody says so"
    return "nothing is lost"


def cut(log: str, at: int) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / log).write_bytes((directory / log).read_bytes()[:at])

    return damage


def test_cut_anywhere_it_is_an_earlier_moment_and_refused_by_the_mark(written: Written, tmp_path: Path):
    size = (written.directory / written.log).stat().st_size
    places = list(range(size, 0, -CUT_EVERY))[:CUTS]
    assert len(places) == CUTS
    seen = Counter(outcome(written, tmp_path / str(at), cut(written.log, at)) for at in places)
    assert seen == {"nothing is lost": 1, "the store is refused": CUTS - 1}


@pytest.mark.parametrize("count", [8, 60, 200, 1000, 4096])
@pytest.mark.parametrize("appended", [False, True], ids=["in place", "appended"])
def test_zeros_at_its_end(written: Written, tmp_path: Path, count: int, appended: bool):
    """What a loss of power may leave: the length was written, the bytes were not. (A last line end that is missing is no harm.)"""

    def damage(directory: Path) -> None:
        path = directory / written.log
        content = path.read_bytes()
        path.write_bytes((content if appended else content[:-count]) + b"\0" * count)

    assert outcome(written, tmp_path / "copy", damage) in ("the server refuses", "the store is refused", "the audit finds it")


def test_flipped_bits(written: Written, tmp_path: Path):
    rng = random.Random(7)
    content = (written.directory / written.log).read_bytes()
    seen: Counter[str] = Counter()
    for number in range(FLIPS):
        bit = rng.randrange(8 * len(content))

        def damage(directory: Path, bit: int = bit) -> None:
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            (directory / written.log).write_bytes(flipped)

        seen[outcome(written, tmp_path / str(number), damage)] += 1
    assert seen.keys() >= {"the server refuses", "the audit finds it"}, "flips that the server loads were what this is about"


@pytest.mark.parametrize("pattern", ["*.manifest", "*.incr.aof", "*.base.rdb", "*"])
def test_files_that_are_gone(written: Written, tmp_path: Path, pattern: str):
    """Without its manifest a server starts, and is empty."""

    def damage(directory: Path) -> None:
        gone = list(directory.glob(f"appendonlydir/{pattern}"))
        assert gone
        for path in gone:
            path.unlink()

    assert outcome(written, tmp_path / "copy", damage) in ("the server refuses", "the store is refused")
