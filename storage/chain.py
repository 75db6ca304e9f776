"""The running hash of a job's log (PROTOCOL.md 11). An AOF has no checksum of its own: two of sixty flipped bits went unnoticed.

    h0 = H(spec as stored, prompt token ids, job id);  hi = H(h(i-1), token)

blake2b-128, hex. Pure functions: the engine computes it, the commit script compares it, recovery recomputes it.
"""

import hashlib
from collections.abc import Iterable, Sequence

_SIZE = 16


def start(spec: str, prompt_token_ids: Sequence[int], job_id: str) -> str:
    """h0. Every part is preceded by its length, so that no two different jobs have equal bytes."""
    digest = hashlib.blake2b(digest_size=_SIZE, person=b"midsentence-h0")
    for part in (spec, " ".join(map(str, prompt_token_ids)), job_id):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def extend(chain: str, token: int) -> str:
    data = bytes.fromhex(chain) + token.to_bytes(8, "little", signed=True)
    return hashlib.blake2b(data, digest_size=_SIZE, person=b"midsentence-hi").hexdigest()


def extend_all(chain: str, tokens: Iterable[int]) -> str:
    for token in tokens:
        chain = extend(chain, token)
    return chain
