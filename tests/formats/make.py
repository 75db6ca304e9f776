"""``python -m tests.formats.make tests/formats/v1``: a small data directory as this version leaves it, to be checked in.

One is made for each format that was ever released, and never changed: a later version must read it, or refuse it in words.
"""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from engine.identity import page_identities, root_identity
from service.processes import harden
from service.redis_server import EmbeddedRedis
from storage.job_spec import JobSpec
from storage.pool_file import PoolFile
from storage.records import Finish, JobStatus, PageEntry
from storage.redis_store import RedisJobStore
from storage.store_file import StoreFile, save_store_file
from tests.storage.backends import MODEL, EngineUnderTest, submit

STORE = "store-of-the-fixture"
GEOMETRY = {"num_pages": 6, "page_shape": (2, 2, 16, 1, 4), "dtype": "float32", "model_fingerprint": MODEL}
ENGINE = {"arithmetic_fingerprint": "arithmetic", "prefill_chunk": 16}
PROMPT = tuple(range(3, 23))
TOKENS = {"job-done": (40, 41, 42), "job-running": tuple(range(50, 80)), "job-queued": ()}
SPEC = JobSpec("demo", 100, 7, temperature=0.5, stop=("end",), logit_bias={5: -1.5}, metadata={"who": "Zoë"})


def make(folder: Path) -> None:
    folder.mkdir(parents=True)
    server = EmbeddedRedis(folder)
    store = RedisJobStore(server.start_or_attach(timeout=10))
    store.bind(store.create(STORE))
    with PoolFile.open(folder / "pool.safetensors", **GEOMETRY) as pool:
        for job_id in TOKENS:
            key = "a key" if job_id == "job-queued" else None
            submit(store, job_id, spec=SPEC.to_json(), prompt_token_ids=PROMPT, idempotency_key=key)
        engine = EngineUnderTest(store, pool_id=pool.pool_id, **ENGINE)
        engine.register()
        engine.claim(limit=2)
        for job_id, tokens in TOKENS.items():
            if tokens:
                end = Finish(JobStatus.COMPLETED, "stop") if job_id == "job-done" else None
                engine.commit(job_id, *tokens, finish=end)
        engine.write(publish=_pages(pool))
    mark = store.identity()
    assert mark is not None
    store.close()
    assert server.stop()
    for name, engine_id in (("store.json", engine.info.engine_id), ("api-store.json", "")):
        save_store_file(folder / name, StoreFile(engine_id, mark.store_id, mark.epoch, mark.commit))
    told = {"store": asdict(mark), "spec": asdict(SPEC), "prompt": PROMPT, "tokens": TOKENS}
    (folder / "expected.json").write_text(json.dumps(told, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    shutil.rmtree(folder / "run")  # locks, sockets, pids: nothing durable
    (folder / "redis" / "redis.log").unlink()


def _pages(pool: PoolFile) -> dict[int, PageEntry]:
    """The sealed pages of the running job, the first one in host page 1."""
    root = root_identity(MODEL, ENGINE["arithmetic_fingerprint"])
    tokens = [*PROMPT, *TOKENS["job-running"]]
    identities = page_identities(root, tokens, len(PROMPT), page_size=16, prefill_chunk=ENGINE["prefill_chunk"])
    entries = {}
    for page, identity in enumerate(identities, start=1):
        data = np.random.default_rng(page).integers(0, 256, pool.page_bytes, dtype=np.uint8)
        entries[page] = PageEntry(identity, pool.write_pages(page, data)[0])
    return entries


if __name__ == "__main__":
    harden()
    make(Path(sys.argv[1]).resolve())
