"""What a page's bits are, by content and by how they were computed (PROTOCOL.md 6). Pure functions."""

import hashlib
from collections.abc import Sequence

import numpy as np

#: the "rows in its call" of a generated row: its kernels do not depend on that number
GENERATED = 0


def root_identity(model_fingerprint: str, arithmetic_fingerprint: str, tenant: str = "") -> str:
    """Identity before the first page: everything that decides a row's bits except the tokens. Hex, 128 bits."""
    text = "\0".join(("midsentence page v1", model_fingerprint, arithmetic_fingerprint, tenant))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def page_identities(
    root: str, tokens: Sequence[int], num_prompt: int, *, page_size: int, prefill_chunk: int, known: Sequence[str] = ()
) -> list[str]:
    """Identities of the full pages of ``tokens``, in order. ``known`` are the leading ones, when they were computed before.

    identity(page) = blake2b-128(identity(previous page), token ids, rows of the call that made each row). The rows matter: a
    100-token and a 128-token prompt share 100 tokens, but a 36-row and a 64-row call give other bits for the same row.
    """
    identities = list(known)
    for index in range(len(identities), len(tokens) // page_size):
        rows = range(index * page_size, (index + 1) * page_size)
        content = np.array([(tokens[row], _call_rows(row, num_prompt, prefill_chunk)) for row in rows], dtype="<u4").tobytes()
        previous = bytes.fromhex(identities[-1] if identities else root)
        identities.append(hashlib.blake2b(previous + content, digest_size=16).hexdigest())
    return identities


def _call_rows(row: int, num_prompt: int, prefill_chunk: int) -> int:
    if row >= num_prompt:
        return GENERATED
    start = row - row % prefill_chunk
    return min(prefill_chunk, num_prompt - start)
