"""Counter-based random numbers (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""

import numpy as np

from engine.kernels.jit import inline

_HALF_WORD = np.uint64(0xFFFFFFFF)


@inline
def uniform(seed: np.uint64, token_index: np.uint64) -> float:
    """The random number in [0, 1) of one token: the top 53 bits of numpy's first word of Philox-4x64 for key ``seed``, counter
    ``token_index``."""
    key0, key1 = np.uint64(seed), np.uint64(0)
    a, b, c, d = np.uint64(token_index + np.uint64(1)), np.uint64(0), np.uint64(0), np.uint64(0)  # numpy counts, then draws
    for _ in range(10):
        high0, low0 = _multiply(np.uint64(0xD2E7470EE14C6C93), a)
        high1, low1 = _multiply(np.uint64(0xCA5A826395121157), c)
        a, b, c, d = high1 ^ b ^ key0, low1, high0 ^ d ^ key1, low0
        key0 = np.uint64(key0 + np.uint64(0x9E3779B97F4A7C15))
        key1 = np.uint64(key1 + np.uint64(0xBB67AE8584CAA73B))
    return float(a >> np.uint64(11)) * 2.0**-53


@inline
def _multiply(a: np.uint64, b: np.uint64) -> tuple[np.uint64, np.uint64]:
    """High and low word of the product."""
    half = np.uint64(32)
    a0, a1, b0, b1 = a & _HALF_WORD, a >> half, b & _HALF_WORD, b >> half
    middle = a1 * b0 + ((a0 * b0) >> half)
    crossed = a0 * b1 + (middle & _HALF_WORD)
    return a1 * b1 + (middle >> half) + (crossed >> half), a * b
