"""Every Redis key name, once. Scripts get the same names as a generated table, so that no Lua file spells one.

The hash tag keeps all keys in one slot; Redis Cluster is not promised all the same. No key has a TTL: keys of one job would
expire apart, and a step of the clock would delete a day's results (PROTOCOL.md 9).
"""

import hashlib

PREFIX = "midsentence:{store}:"

STORE = (
    PREFIX + "store"
)  #: hash: id, epoch, commit, order, beat, format, file_bytes; of storage.rewrite: purges, purges_rewritten, rewrite_at
JOB = PREFIX + "job:"  #: + job id -> hash
LOG = PREFIX + "log:"  #: + job id -> stream, one entry per token
QUEUE = PREFIX + "queue:"  #: + model fingerprint -> zset of queued jobs
ENGINES = PREFIX + "engines"  #: set of engine ids
ENGINE = PREFIX + "engine:"  #: + engine id -> hash
OWNED = PREFIX + "owned:"  #: + engine id -> set of the ids of its jobs
APIS = PREFIX + "apis"  #: hash, incarnation of an api -> its last beat, while a job lives that ends with it
SERVED = PREFIX + "served:"  #: + incarnation of an api -> set of the live jobs that end with it
POOL = PREFIX + "pool:"  #: + pool id -> hash, host page -> "identity checksum time"
IDEMPOTENCY = PREFIX + "idempotency:"  #: + digest of tenant and key -> ids of the jobs it made; it lives as long as the first
INDEX = PREFIX + "index:"  #: + status, "all" or "stored" -> zset of all tenants' jobs by order
TENANT_INDEX = PREFIX + "tenant:"  #: + tenant + ":" + status, "all" or "stored" -> the same of one tenant
COUNTS = PREFIX + "counts"  #: hash, status -> number of jobs
DEADLINES = PREFIX + "deadlines"  #: zset of live jobs by deadline
EXPIRY = PREFIX + "expiry"  #: zset of terminal jobs by the time they ended; a batch's jobs go with it
FILE = PREFIX + "file:"  #: + file id -> hash; its presence is the end of the upload
FILE_BYTES = PREFIX + "file-bytes:"  #: + upload id -> hash, number -> 256 KiB of the file; "file" once it is one
UPLOADS = PREFIX + "uploads"  #: zset of uploads that are no file yet, by the time of the last bytes
FILES = PREFIX + "files:"  #: + tenant -> zset of its files by order
FILE_EXPIRY = PREFIX + "file-expiry"  #: zset of files that no batch was made of, by the time they were made
BATCH = PREFIX + "batch:"  #: + batch id -> hash
BATCHES = PREFIX + "batches:"  #: + tenant -> zset of its batches by order
BATCH_JOBS = PREFIX + "batch-jobs:"  #: + batch id -> set of its live jobs
BATCH_COUNTS = PREFIX + "batch-counts"  #: hash, status -> number of batches
LIVE_BATCHES = PREFIX + "live-batches"  #: zset of batches that have not ended, by order
BATCH_EXPIRY = PREFIX + "batch-expiry"  #: zset of ended batches by the time they ended
HINTS = PREFIX + "hints"  #: channel; the message is the id of a job whose state changed
TOKEN_HINTS = PREFIX + "token-hints"  #: channel; the message is the id of a job that got tokens
VITALS = PREFIX + "vitals"  #: channel; the message is how an engine does, or nothing when it only asks whether anybody listens

#: What Redis must hold under each key or beginning of a key: the audit finds anything else.
TYPES = {
    STORE: "hash", JOB: "hash", LOG: "stream", QUEUE: "zset", ENGINES: "set", ENGINE: "hash", OWNED: "set",
    APIS: "hash", SERVED: "set", POOL: "hash",
    IDEMPOTENCY: "string", INDEX: "zset", TENANT_INDEX: "zset", COUNTS: "hash", DEADLINES: "zset", EXPIRY: "zset",
    FILE: "hash", FILE_BYTES: "hash", UPLOADS: "zset", FILES: "zset", FILE_EXPIRY: "zset",
    BATCH: "hash", BATCHES: "zset", BATCH_JOBS: "set", BATCH_COUNTS: "hash", LIVE_BATCHES: "zset", BATCH_EXPIRY: "zset",
}  # fmt: skip


def job(job_id: str) -> str:
    return JOB + job_id


def log(job_id: str) -> str:
    return LOG + job_id


def queue(model_fingerprint: str) -> str:
    return QUEUE + model_fingerprint


def engine(engine_id: str) -> str:
    return ENGINE + engine_id


def owned(engine_id: str) -> str:
    return OWNED + engine_id


def served(api: str) -> str:
    return SERVED + api


def pool(pool_id: str) -> str:
    return POOL + pool_id


def index(status: str, tenant: str | None) -> str:
    return INDEX + status if tenant is None else f"{TENANT_INDEX}{tenant}:{status}"


def idempotency_digest(tenant: str, key: str) -> str:
    """Of any two strings a client may send: neither their length nor their bytes reach a key name."""
    return hashlib.blake2b(f"{len(tenant)}:{tenant}{key}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def lua_table() -> str:
    """``local KEY = {...}`` for the scripts' preamble. Names are constants of this file, never input."""
    names = {
        "store": STORE, "job": JOB, "log": LOG, "queue": QUEUE, "engines": ENGINES, "engine": ENGINE, "owned": OWNED,
        "apis": APIS, "served": SERVED, "pool": POOL,
        "idempotency": IDEMPOTENCY, "index": INDEX, "tenant_index": TENANT_INDEX, "counts": COUNTS,
        "deadlines": DEADLINES, "expiry": EXPIRY, "hints": HINTS, "token_hints": TOKEN_HINTS,
        "file": FILE, "file_bytes": FILE_BYTES, "uploads": UPLOADS, "files": FILES, "file_expiry": FILE_EXPIRY,
        "batch": BATCH, "batches": BATCHES, "batch_jobs": BATCH_JOBS, "batch_counts": BATCH_COUNTS,
        "live_batches": LIVE_BATCHES, "batch_expiry": BATCH_EXPIRY,
    }  # fmt: skip
    return "local KEY = {" + ", ".join(f"{name} = '{value}'" for name, value in names.items()) + "}\n"
