"""A finished job after its retention time: nothing of it is left in the state directory, also when the engine dies on the way.

What is searched for: its words, the token ids of its prompt, its id and chain hash, the bytes of its KV pages. A second job of the
same kind is kept, and its words must be found all along: else the search would prove nothing.
"""

import re
import secrets

import httpx
import pytest
import redis

from chaos.cluster import Cluster
from chaos.place import ClusterOptions, fired_failpoints
from chaos.processes import wait_until
from storage import keys
from storage.pool_file import read_pool_header
from tests.traces import holding, runs

RETENTION = 5


@pytest.fixture
def cluster(tiny_folder, tmp_path):
    with Cluster(tmp_path / "c", ClusterOptions(str(tiny_folder), settings={"retention_seconds": str(RETENTION)})) as made:
        yield made


class Watched:
    """A job, and how to look at it without reading it: what is read is kept for five more minutes."""

    def __init__(self, cluster: Cluster) -> None:
        self.words = " ".join(secrets.token_urlsafe(30) for _ in range(6))
        self.url = f"{cluster.url}/v1/jobs"
        self._redis = redis.Redis.from_url(cluster.redis_url, decode_responses=True)
        body = {"prompt": self.words, "metadata": {"note": self.words}, "max_tokens": 48, "ignore_eos": True}
        self.id = httpx.post(self.url, json=body, timeout=60, trust_env=False).json()["id"]

    def read(self) -> None:
        httpx.get(f"{self.url}/{self.id}", timeout=60, trust_env=False).raise_for_status()

    def record(self) -> dict[str, str]:
        return self._redis.hgetall(keys.job(self.id))

    def wait_finished(self) -> None:
        wait_until(lambda: bool(self.record()["finished_at"]), 60, "the end of the job")

    @property
    def gone(self) -> bool:
        return not self.record() and not self._redis.exists(keys.log(self.id))


class Pool:
    """The pool as anybody sees it who reads the directory and Redis."""

    def __init__(self, cluster: Cluster) -> None:
        self._path = cluster.main.data_dir / "pool.safetensors"
        self._header = read_pool_header(self._path)
        self._redis = redis.Redis.from_url(cluster.redis_url)

    def used(self) -> dict[int, bytes]:
        """The pages that are not zeros."""
        header, content = self._header, self._path.read_bytes()
        begins = range(header.data_offset, header.file_bytes, header.page_bytes)
        pages = {number: content[begin : begin + header.page_bytes] for number, begin in enumerate(begins)}
        return {number: page for number, page in pages.items() if any(page)}

    def named(self) -> set[int]:
        """The pages with an entry."""
        return set(map(int, self._redis.hkeys(keys.pool(self._header.pool_id))))


class Traces:
    """What a job left in the state directory, in pieces to search for."""

    def __init__(self, cluster: Cluster, job: Watched, pages: list[bytes]) -> None:
        record = job.record()
        self._folders = cluster.place / "data", cluster.place / "redis"
        #: short runs of token ids are in other prompts too
        self._texts = [runs(job.words), runs(job.id), runs(record["chain"]), runs(record["prompt"], length=40)]
        rows = [page[at : at + 64] for page in pages for at in range(0, len(page), 1024)]
        self._rows = [row for row in rows if len(set(row)) > 16]
        assert len(self._rows) > 100

    def whole(self) -> bool:
        return all(holding(text, *self._folders) for text in self._texts) and all(
            holding([row], *self._folders) for row in self._rows
        )

    def any(self) -> bool:
        return bool(holding([piece for text in self._texts for piece in text] + self._rows, *self._folders))


def finished_jobs(cluster: Cluster) -> tuple[Watched, Watched, Traces]:
    """One job that is kept, one that is to vanish, and the traces of that one."""
    job, kept = Watched(cluster), Watched(cluster)
    kept.wait_finished()
    kept.read()
    job.wait_finished()
    pool = Pool(cluster)
    wait_until(lambda: len(pool.used()) > 24 and pool.named() == pool.used().keys(), 10, "the entries of both jobs' pages")
    traces = Traces(cluster, job, list(pool.used().values()))
    assert traces.whole()
    return kept, job, traces


def check_the_end(cluster: Cluster, kept: Watched, job: Watched, traces: Traces) -> None:
    pool = Pool(cluster)
    wait_until(lambda: job.gone, 60, "the purge")
    wait_until(lambda: not pool.used(), 60, "zeros in the whole pool")
    wait_until(lambda: not traces.any(), 30, "the end of all traces")
    assert kept.record()
    assert holding(runs(kept.words), cluster.place / "data", cluster.place / "redis")
    metrics = httpx.get(f"http://127.0.0.1:{cluster.main.port}/metrics", timeout=10, trust_env=False).text
    assert re.search(r"page_verify_failures_total 0\.0", metrics), "an entry named a page that was zeroed"
    Watched(cluster).wait_finished()  # and the service goes on with what is left


def test_of_a_purged_job_nothing_is_left(cluster):
    cluster.serve()
    check_the_end(cluster, *finished_jobs(cluster))
    assert cluster.stop() == 0


def test_nor_when_the_engine_is_killed_before_it_zeroes_what_it_gave_up(cluster):
    cluster.start_redis()
    cluster.start_api()
    cluster.start_engine(failpoints="pool.before_zero=kill")
    cluster.wait_ready()
    kept, job, traces = finished_jobs(cluster)
    cluster.wait_exit("engine", 60)
    assert [line.split()[0] for line in fired_failpoints(cluster.failpoint_log)] == ["pool.before_zero"]
    pool = Pool(cluster)
    unnamed = pool.used().keys() - pool.named()
    assert unnamed, "no entry was dropped, or its page was zeroed before"  # and a start finds no entry that tells of them
    cluster.start_engine()
    cluster.wait_ready()
    wait_until(lambda: not unnamed & pool.used().keys(), RETENTION, "zeros in the pages that no entry named")
    check_the_end(cluster, kept, job, traces)
    cluster.stop()
