"""One forward pass over pages on a device: keys and values into their slots, attention through the page tables.

``torch.nn.attention.varlen.varlen_attn`` with ``num_splits=1`` is documented to give a sequence the same bits whatever else is in
the call. (With page tables any other number of splits gives wrong rows: pytorch issue 194167, open when torch was 2.13.) Its mask
``window_size=(-1, 0)`` is aligned to the right: the last query sees ``seqused_k`` keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from engine.calls import DeviceCall
from engine.model import LoadedModel

#: ``varlen_attn`` or what keeps its contract
VarlenAttention = Callable[..., Any]
varlen_attention: VarlenAttention = varlen_attn


@dataclass(frozen=True)
class PagedCall(DeviceCall):
    """T rows of S sequences, sequence after sequence; all tensors on the device of the pool.

    ``source`` says which rows' keys and values are written, ``pages`` and ``slots`` where.
    """

    pool: torch.Tensor  #: [num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]
    page_tables: torch.Tensor  #: int32 [S, max_pages], contiguous
    lengths: torch.Tensor  #: int32 [S]: how many slots each sequence's last row sees
    cu_seq_q: torch.Tensor  #: int32 [S + 1]: where each sequence's rows begin
    cu_seq_k: torch.Tensor  #: int32 [S + 1]: the same of slots; the kernel wants it and, with page tables, does without
    max_q: int  #: rows of the longest
    source: torch.Tensor  #: int64 [W]
    pages: torch.Tensor  #: int64 [W]
    slots: torch.Tensor  #: int64 [W]
    attention: VarlenAttention

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        keys, values = self.pool[:, layer, 0], self.pool[:, layer, 1]
        keys.index_put_((self.pages, self.slots), key[0].transpose(0, 1).index_select(0, self.source))
        values.index_put_((self.pages, self.slots), value[0].transpose(0, 1).index_select(0, self.source))
        output: torch.Tensor = self.attention(
            query[0].transpose(0, 1),
            keys,
            values,
            self.cu_seq_q,
            self.cu_seq_k,
            self.max_q,
            self.page_tables.shape[1] * keys.shape[1],
            scale=scale,
            window_size=(-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
            seqused_k=self.lengths,
            block_table=self.page_tables,
            num_splits=1,
        )
        return output[None]


def forward(model: LoadedModel, call: PagedCall, token_ids: torch.Tensor, positions: torch.Tensor, last_rows: int) -> torch.Tensor:
    """Logits [rows, vocab_size] of the last rows (all of them for 0), as the model gives them: its dtype, on the device.

    ``token_ids`` and ``positions``: int64 [T]. Waits for nothing, so that a CUDA graph can capture it.
    """
    with model.lock, torch.inference_mode():
        model.slot.call = call
        try:
            logits: torch.Tensor = model.module(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=last_rows
            ).logits[0]
        finally:
            model.slot.call = None
    return logits
