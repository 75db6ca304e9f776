"""A loaded model, and the two ways to one: through transformers, or from what was packed the last time. Free of transformers."""

import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from engine import packed_weights
from engine.calls import CallSlot
from engine.geometry import PageGeometry
from engine.llama import LlamaWeights

if TYPE_CHECKING:
    from engine.rowwise import FunctionalRows


@dataclass(frozen=True)
class LoadedModel:
    """A causal model ready for runners. One call at a time goes through it (``lock``), however many runners it has."""

    module: Any
    """transformers' own; None where ``llama`` does all the work."""
    llama: LlamaWeights | None
    slot: CallSlot
    folder: Path
    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    weights: str
    """Number format of the weights, one of ``kernels.panels.FORMATS``; on a device what ``kv_dtype`` is."""
    kv_dtype: str
    """Number format of pages; on a device of everything."""
    threads: int
    device: str = "cpu"
    functional_rows: "FunctionalRows | None" = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def geometry(self, page_size: int) -> PageGeometry:
        """The pages of this model with ``page_size`` slots each."""
        return PageGeometry(self.num_layers, page_size, self.num_kv_heads, self.head_dim, self.kv_dtype)

    @cached_property
    def rope_table(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Of a Llama-shaped model: see ``LlamaWeights.rope_table``."""
        assert self.llama is not None
        return self.llama.rope_table(self.max_context)


def load_model(
    folder: Path,
    *,
    weights: str = "fp32",
    kv_dtype: str = "float32",
    threads: int,
    device: str = "cpu",
    packed: Path | None = None,
    fused: bool = True,
) -> LoadedModel:
    """Load the safetensors model in ``folder`` (see ``engine.model_source.resolve``) for ``threads`` CPU threads.

    On the ``cpu``, ``weights`` is ``fp32``, ``bf16`` or ``int8`` and ``kv_dtype``, that of the pages, ``float32``, ``bfloat16`` or
    ``float16``; arithmetic is float32, and Llama-shaped models take the fused kernels unless ``fused`` is False. ``packed`` is
    where the packed weights of this very model are or are to be kept (``packed_weights.folder_for``): a later start maps them,
    without transformers, since the model was proved when they were packed. On ``cuda`` or ``cuda:N`` all is ``kv_dtype``:
    bfloat16 or float16.

    Sets torch's thread count, and for CUDA how cuBLAS takes its sums, process-wide. Raises ``ModelNotFound``,
    ``ModelFilesInvalid``, or ``UnsupportedModel`` where we would give other text than the model's own code does (an unsupported
    argument of its attention, a window shorter than its context, state beyond keys and values, or logits of a probe that differ
    from eager attention), or where the device cannot compute it exactly.
    """
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    torch.set_num_threads(threads)
    fused = fused and torch.device(device).type == "cpu"
    if fused and packed is not None and (model := _from_packed(folder, packed, weights, kv_dtype, threads)) is not None:
        return model
    from engine.model_loader import load_through_transformers

    model = load_through_transformers(folder, weights=weights, kv_dtype=kv_dtype, threads=threads, device=device, fused=fused)
    if packed is None or model.llama is None:
        return model
    packed_weights.save(packed, model.llama, {name: getattr(model, name) for name in _FACTS})
    return _from_packed(folder, packed, weights, kv_dtype, threads) or model


#: what is kept of a model beside its weights
_FACTS = ("architecture", "num_layers", "num_kv_heads", "head_dim", "vocab_size", "max_context", "eos_token_ids")


def _from_packed(folder: Path, packed: Path, weights: str, kv_dtype: str, threads: int) -> LoadedModel | None:
    found = packed_weights.load(packed)
    if found is None:
        return None
    llama, facts = found
    facts["eos_token_ids"] = tuple(facts["eos_token_ids"])
    return LoadedModel(
        module=None,
        llama=llama,
        slot=CallSlot(threads),
        folder=folder,
        weights=weights,
        kv_dtype=kv_dtype,
        threads=threads,
        **facts,
    )
