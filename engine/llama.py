"""Llama-shaped models (Llama, Mistral, Qwen2, Qwen3, SmolLM): their weights, laid out for the fused kernels.

The shape: RMS norm, grouped-query attention with rotary embedding, RMS norm, SwiGLU; biases on queries, keys and values or none;
norms of queries and keys or none. What deviates keeps the module path (``rowwise``).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.kernels.llama import Weights

_F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LlamaWeights:
    """Everything that the fused forward pass needs of a model."""

    weights: Weights
    inv_freq: _F32
    """[head_dim / 2]: rotary frequencies."""
    rope_scale: float
    epsilon: float
    scaling: float
    """Of attention scores."""

    def rope_table(self, max_context: int) -> tuple[_F32, _F32]:
        """Cosines and sines, [max_context, head_dim / 2] each, as transformers has them: angles in float32."""
        angles = np.arange(max_context, dtype=np.float32)[:, None] * self.inv_freq[None]
        return tuple((f(angles.astype(np.float64)) * self.rope_scale).astype(np.float32) for f in (np.cos, np.sin))  # type: ignore[return-value]
