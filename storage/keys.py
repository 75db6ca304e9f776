"""Every Redis key name, once. Scripts get the same names as a generated table, so that no Lua file spells one.

The hash tag keeps all keys in one slot; Redis Cluster is not promised all the same. No key has a TTL: keys of one job would
expire apart, and a step of the clock would delete a day's results (PROTOCOL.md 9).
"""

import hashlib

PREFIX = "midsentence:{store}:"

STORE = PREFIX + "store"  #: hash: id, epoch, commit, order
JOB = PREFIX + "job:"  #: + job id -> hash
LOG = PREFIX + "log:"  #: + job id -> stream, one entry per token
QUEUE = PREFIX + "queue:"  #: + model fingerprint -> zset of queued jobs
ENGINES = PREFIX + "engines"  #: set of engine ids
ENGINE = PREFIX + "engine:"  #: + engine id -> hash
OWNED = PREFIX + "owned:"  #: + engine id -> set of the ids of its jobs
POOL = PREFIX + "pool:"  #: + pool id -> hash, host page -> "identity checksum"
IDEMPOTENCY = PREFIX + "idempotency:"  #: + digest of tenant and key -> ids of the jobs it made; it lives as long as the first
INDEX = PREFIX + "index:"  #: + status or "all" -> zset of all tenants' jobs by order
TENANT_INDEX = PREFIX + "tenant:"  #: + tenant + ":" + status or "all" -> the same of one tenant
COUNTS = PREFIX + "counts"  #: hash, status -> number of jobs
DEADLINES = PREFIX + "deadlines"  #: zset of live jobs by deadline
EXPIRY = PREFIX + "expiry"  #: zset of terminal jobs by the time they ended
HINTS = PREFIX + "hints"  #: channel; the message is the id of a job whose state changed
TOKEN_HINTS = PREFIX + "token-hints"  #: channel; the message is the id of a job that got tokens


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
        "pool": POOL, "idempotency": IDEMPOTENCY, "index": INDEX, "tenant_index": TENANT_INDEX, "counts": COUNTS,
        "deadlines": DEADLINES, "expiry": EXPIRY, "hints": HINTS, "token_hints": TOKEN_HINTS,
    }  # fmt: skip
    return "local KEY = {" + ", ".join(f"{name} = '{value}'" for name, value in names.items()) + "}\n"
