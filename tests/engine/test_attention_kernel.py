"""The attention kernel against softmax in float64, and against itself: a row's bits depend on its own sequence alone."""

import numpy as np
import pytest
import torch

from engine.kernels.attention import attend_rows
from engine.kernels.jit import use_threads
from engine.pools import DTYPES, kernel_array

LAYERS, SEQUENCES, LONGEST = 2, 3, 207


@pytest.fixture(autouse=True)
def two_threads():
    use_threads(2)


def filled_pool(rng, page_size, kv_heads, dim, kv_dtype):
    """Pages of random keys and values, and a table for each sequence that scatters over them."""
    pages_each = -(-LONGEST // page_size)
    shape = (SEQUENCES * pages_each, LAYERS, 2, page_size, kv_heads, dim)
    pool = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(DTYPES[kv_dtype])
    return pool, rng.permutation(shape[0]).astype(np.int32).reshape(SEQUENCES, pages_each)


def attend(pool, tables, rows, query, key, value, scaling, layer=1, threads=2):
    """``rows``: (sequence, position) of each; writes into ``pool``."""
    output = np.full(query.shape, np.nan, np.float32)
    sequences, positions = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    attend_rows(query, key, value, kernel_array(pool), layer, tables, sequences, positions, np.float32(scaling), output, threads)
    return output


def expected(pool, table, position, query, scaling, page_size):
    """float64; ``query`` [heads, dim]."""
    slots = pool[torch.from_numpy(table).long(), 1].double().numpy()  # [pages, 2, page_size, kv_heads, dim]
    keys, values = (np.concatenate(list(slots[:, half]))[: position + 1] for half in (0, 1))
    group = len(query) // keys.shape[1]
    result = np.empty(query.shape)
    for head, vector in enumerate(query.astype(np.float64)):
        scores = keys[:, head // group] @ vector * scaling
        weights = np.exp(scores - scores.max())
        result[head] = weights / weights.sum() @ values[:, head // group]
    return result


@pytest.mark.parametrize(
    ("page_size", "kv_heads", "group", "dim", "kv_dtype"),
    [
        (16, 3, 3, 64, "float32"),
        (16, 3, 3, 64, "bfloat16"),
        (16, 2, 1, 128, "float16"),
        (4, 1, 8, 16, "float32"),
        (24, 2, 2, 40, "float32"),
        (64, 1, 5, 8, "float16"),
    ],
)
def test_rows_attend_to_all_positions_up_to_their_own(page_size, kv_heads, group, dim, kv_dtype):
    rng = np.random.default_rng(1)
    pool, tables = filled_pool(rng, page_size, kv_heads, dim, kv_dtype)
    # A run that ends in each kind of place, lone rows at the edges of blocks of 64, the very first row.
    rows = [(0, p) for p in range(120, 207)] + [(1, p) for p in (0, 31, 32, 63, 64, 65, 127, 128, 191, 192, 206)] + [(2, 0)]
    query = rng.standard_normal((len(rows), kv_heads * group, dim), dtype=np.float32)
    key, value = (rng.standard_normal((len(rows), kv_heads, dim), dtype=np.float32) for _ in range(2))
    together, scaling = attend(pool, tables, rows, query, key, value, dim**-0.5), dim**-0.5
    for i, (sequence, position) in enumerate(rows):
        reference = expected(pool, tables[sequence], position, query[i], scaling, page_size)
        np.testing.assert_allclose(together[i], reference, rtol=1e-4, atol=1e-5)
    for i, row in enumerate(rows):
        alone = attend(pool, tables, [row], *(part[i : i + 1] for part in (query, key, value)), scaling, threads=1)
        assert np.array_equal(alone[0], together[i]), row
    for parts in (rows[:7], rows[7:40], rows[3:20] + rows[60:]):
        picked = [rows.index(row) for row in parts]
        some = attend(pool, tables, parts, *(part[picked] for part in (query, key, value)), scaling, threads=5)
        assert np.array_equal(some, together[picked])


def test_what_lies_behind_a_row_does_not_reach_it():
    """Positions that are not written yet may hold anything, in its page and in those that follow."""
    rng = np.random.default_rng(2)
    pool, tables = filled_pool(rng, 16, 2, 32, "float32")
    query = rng.standard_normal((1, 4, 32), dtype=np.float32)
    key, value = (rng.standard_normal((1, 2, 32), dtype=np.float32) for _ in range(2))
    for position in (0, 37, 63, 64, 100):
        before = attend(pool, tables, [(0, position)], query, key, value, 0.2)
        spoiled = pool.clone()
        for later in range(position + 1, LONGEST):
            spoiled[tables[0][later // 16], :, :, later % 16] = float("nan")
        assert np.array_equal(attend(spoiled, tables, [(0, position)], query, key, value, 0.2), before)
