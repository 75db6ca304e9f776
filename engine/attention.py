"""Our attention, as transformers calls it: registered under the name ``midsentence``.

transformers calls the hook once per layer with that layer's queries, keys and values; where they belong (which pages, which
positions) it finds in the ``CallSlot`` that the runner filled before it called the model. The slot hangs on the modules of its
model, so runners share nothing.
"""

import time
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from engine.calls import CallSlot, ChunkCall, DeviceCall, ObserveCall, RowsCall
from engine.chunk_attention import causal_attention, plain_causal_attention
from engine.errors import UnsupportedModel
from engine.kernels.attention import attend_rows

NAME = "midsentence"
SLOT_ATTRIBUTE = "midsentence_slot"

# What models hand on to every attention without meaning for ours: positions are applied before, masks are ours, outputs are not
# recorded.
_MEANINGLESS = frozenset(
    [
        "position_ids",
        "cache_position",
        "use_cache",
        "cache",
        "past_key_values",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "head_mask",
        "layer_head_mask",
        "layer_idx",
        "position_embeddings",
    ]
)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """``query`` [1, num_heads, n, head_dim], ``key`` and ``value`` [1, num_kv_heads, n, head_dim] → [1, n, num_heads, head_dim].

    Raises ``UnsupportedModel`` naming any argument whose meaning we would otherwise ignore.
    """
    slot: CallSlot = getattr(module, SLOT_ATTRIBUTE)
    call = slot.call
    _refuse_unknown(module, attention_mask, dropout, is_causal, kwargs)
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    if isinstance(call, RowsCall | ChunkCall):
        began = time.perf_counter_ns()
        attend = _attend_rows if isinstance(call, RowsCall) else _attend_chunk
        output = attend(call, _layer(module), query, key, value, scale)  # type: ignore[arg-type]
        slot.attention_time[0] += time.perf_counter_ns() - began
        return output, None
    if isinstance(call, DeviceCall):
        return call.attend(_layer(module), query, key, value, scale), None
    if type(call) is ObserveCall:
        call.layers.append(_layer(module))
        call.shapes.append((key.shape[1], key.shape[3], value.shape[3]))
        call.windows.append(sliding_window)
        return plain_causal_attention(query, key, value, scale, 0), None
    raise RuntimeError("attention was called outside a runner's call")


def _layer(module: torch.nn.Module) -> int:
    layer: int | None = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedModel(
            f"{type(module).__name__} does not say which layer it is", "only models with layer_idx are served", field="layer_idx"
        )
    return layer


def _refuse_unknown(
    module: torch.nn.Module, attention_mask: torch.Tensor | None, dropout: float, is_causal: bool | None, kwargs: dict[str, Any]
) -> None:
    for name, given in kwargs.items():
        if given is not None and name not in _MEANINGLESS:
            raise UnsupportedModel(
                f"{type(module).__name__} asks its attention for {name}, which we would have to ignore",
                "the text would be wrong, so the model is refused",
                field=name,
            )
    if attention_mask is not None:
        raise UnsupportedModel(
            f"{type(module).__name__} brings its own attention mask", "position biases are not supported", field="attention_mask"
        )
    if dropout or is_causal is False:
        raise UnsupportedModel(
            f"{type(module).__name__} is not causal at inference", "only causal models are served", field="is_causal"
        )


def _attend_rows(
    call: RowsCall, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    packed = query.transpose(1, 2).contiguous()
    output = torch.empty_like(packed)
    attend_rows(
        packed.numpy()[0],
        key.transpose(1, 2).contiguous().numpy()[0],
        value.transpose(1, 2).contiguous().numpy()[0],
        call.pool,
        layer,
        call.page_tables,
        call.row_sequence,
        call.positions,
        np.float32(scale),
        output.numpy()[0],
        call.threads,
    )
    return output


def _attend_chunk(
    call: ChunkCall, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    end = call.start + query.shape[2]
    first = max(call.start, call.store_from)
    if first < end:
        positions = torch.arange(first, end)
        pages, slots = call.pages[positions // call.page_size], positions % call.page_size
        call.pool[pages, layer, 0, slots] = key[0, :, first - call.start :].transpose(0, 1).to(call.pool.dtype)
        call.pool[pages, layer, 1, slots] = value[0, :, first - call.start :].transpose(0, 1).to(call.pool.dtype)
    return causal_attention(call.pool, layer, call.pages, query, scale, call.start, end)


AttentionInterface.register(NAME, paged_attention)
