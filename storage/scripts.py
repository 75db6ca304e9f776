"""The Lua scripts, assembled from ``lua/``: key names, the store check, what verbs share, then the verb.

Text is constant; everything variable goes through ARGV. Keys are not declared as KEYS: a claim finds its jobs while it runs, and
Redis Cluster is not promised.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from storage import keys

#: These make or change the identity itself, so they do their own check.
_UNCHECKED = ("create", "raise_epoch")
VERBS = (
    *_UNCHECKED, "submit", "register", "claim", "commit", "publish", "drop", "release", "renew", "take_over", "beat",
    "cancel", "fail", "describe", "delete", "touch", "sweep_deadlines", "expired", "purge", "rewrite", "rewritten",
    "put_chunk", "create_file", "drop_upload", "delete_file", "purge_file",
    "create_batch", "begin_batch", "feed", "cancel_batch", "advance_batch", "touch_batch", "delete_output",
    "purge_batch",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Script:
    verb: str
    text: str
    sha: str


@cache
def script(verb: str) -> Script:
    parts = [keys.lua_table()]
    if verb not in _UNCHECKED:
        parts.append(_source("store"))
    parts += [_source(each) for each in ("base", "batches", "jobs", verb)]
    text = "".join(parts)
    return Script(verb, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def all_scripts() -> tuple[Script, ...]:
    return tuple(map(script, VERBS))


def _source(name: str) -> str:
    return resources.files("storage").joinpath("lua", f"{name}.lua").read_text("utf-8")
