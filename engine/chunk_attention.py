"""Attention of prompt chunks on the CPU: torch's, over keys and values gathered from the pages."""

import torch
from torch.nn import functional as F


def causal_attention(
    pool: torch.Tensor, layer: int, pages: torch.Tensor, query: torch.Tensor, scale: float, start: int, end: int
) -> torch.Tensor:
    """Attention of a chunk's rows ``start .. end - 1`` over positions ``0 .. end - 1``, which are in ``pages`` (int64).

    ``query`` float32 [1, num_heads, rows, head_dim] → [1, rows, num_heads, head_dim]. Keys and values always come from the pages,
    never from the rows just computed: a restored prefix takes the very same path.
    """
    keys, values = (
        pool[:, layer, kind].index_select(0, pages).flatten(0, 1)[:end].transpose(0, 1).unsqueeze(0).to(query.dtype)
        for kind in (0, 1)
    )
    return plain_causal_attention(query, keys, values, scale, start)


def plain_causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, start: int) -> torch.Tensor:
    """Causal attention of rows ``start ..`` over all of ``key``; its shapes, and so its bits, depend on the sequence alone."""
    rows, end = query.shape[2], key.shape[2]
    mask = torch.ones(rows, end, dtype=torch.bool).tril(start) if start else None
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2)
