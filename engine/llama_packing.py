"""From transformers' module of a Llama-shaped model to the weights of the fused kernels."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import activations

from engine.kernels.llama import Weights
from engine.kernels.panels import WIDTH, num_panels, pack, panels_for, unpack
from engine.llama import LlamaWeights

_F32 = npt.NDArray[np.float32]
_SHAPED_LIKE_LLAMA = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def is_llama_shaped(module: Any) -> bool:
    """Whether ``pack_llama`` takes it."""
    if type(module).__name__ not in _SHAPED_LIKE_LLAMA or module.config.hidden_size % 2 or module.config.intermediate_size % 2:
        return False
    for layer in module.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        plain = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        if any(type(linear) is not nn.Linear or linear.bias is not None for linear in plain):
            return False
        biases = [linear.bias is not None for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
        if any(biases) != all(biases) or not isinstance(mlp.act_fn, nn.SiLU | activations.SiLUActivation):
            return False
    return module.get_output_embeddings().bias is None


def pack_llama(module: Any, weights: str, threads: int) -> LlamaWeights:
    """The weights of ``module`` in the number format ``weights`` (see ``panels.FORMATS``).

    The module's own are set to what was kept of them, so that it stays the reference for our results.
    """
    packer = _Packer(weights, threads)
    rope = module.model.rotary_emb
    return LlamaWeights(
        weights=Weights(**_layers(module, packer), **_embeddings(module, packer), **_vectors(module)),
        inv_freq=rope.inv_freq.detach().float().numpy().copy(),
        rope_scale=float(rope.attention_scaling),
        epsilon=float(module.config.rms_norm_eps),
        scaling=float(module.model.layers[0].self_attn.scaling),
    )


def _layers(module: Any, packer: "_Packer") -> dict[str, npt.NDArray[Any]]:
    """The projections of all layers, with their scales."""
    layers, config = module.model.layers, module.config
    count, hidden, channels = len(layers), config.hidden_size, config.intermediate_size
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, layers[0].self_attn.head_dim
    pairs = num_panels(channels)
    widths = {
        "qkv": ((heads + 2 * kv_heads) * dim, hidden),
        "out": (hidden, heads * dim),
        "gate_up": (2 * pairs * WIDTH, hidden),
        "down": (hidden, channels),
    }
    found = {}
    for name, (outputs, length) in widths.items():
        found[name], found[f"{name}_scale"] = packer.room(count, outputs, length)
    for i, layer in enumerate(layers):
        attention, mlp = layer.self_attn, layer.mlp
        packer.pack([attention.q_proj, attention.k_proj, attention.v_proj], found["qkv"][i], found["qkv_scale"][i])
        packer.pack([attention.o_proj], found["out"][i], found["out_scale"][i])
        packer.pack([mlp.down_proj], found["down"][i], found["down_scale"][i])
        # Panels of gate and up alternate.
        alternate, scales = found["gate_up"][i].reshape(pairs, 2, hidden, WIDTH), found["gate_up_scale"][i].reshape(pairs, 2, WIDTH)
        for half, linear in enumerate((mlp.gate_proj, mlp.up_proj)):
            panels, scale = packer.room(1, channels, hidden)
            packer.pack([linear], panels[0], scale[0])
            alternate[:, half], scales[:, half] = panels[0], scale[0].reshape(pairs, WIDTH)
    return found


def _embeddings(module: Any, packer: "_Packer") -> dict[str, npt.NDArray[Any]]:
    """The output layer and the embedding, which may be one."""
    config, output, embedding = module.config, module.get_output_embeddings(), module.get_input_embeddings()
    tied = embedding.weight is output.weight
    (head,), (head_scale,) = packer.room(1, config.vocab_size, config.hidden_size)
    packer.pack([output], head, head_scale)
    if tied:
        embedding.weight = output.weight
        return {"head": head, "head_scale": head_scale, "embedding": head, "embedding_scale": head_scale}
    (table,), (table_scale,) = packer.room(1, config.vocab_size, config.hidden_size)
    packer.pack([embedding], table, table_scale)
    return {"head": head, "head_scale": head_scale, "embedding": table, "embedding_scale": table_scale}


def _vectors(module: Any) -> dict[str, _F32]:
    """Norms and biases; [layers, n], where n is 0 when the model has none."""

    def stacked(tensors: list[torch.Tensor | None]) -> _F32:
        return np.stack([np.empty(0, np.float32) if t is None else t.detach().float().numpy() for t in tensors])

    def bias(attention: Any) -> torch.Tensor | None:
        parts = [linear.bias for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
        return None if parts[0] is None else torch.cat(parts)

    layers = module.model.layers
    return {
        "qkv_bias": stacked([bias(layer.self_attn) for layer in layers]),
        "input_norm": stacked([layer.input_layernorm.weight for layer in layers]),
        "post_norm": stacked([layer.post_attention_layernorm.weight for layer in layers]),
        "final_norm": module.model.norm.weight.detach().float().numpy().copy(),
        "query_norm": stacked([_norm_weight(layer.self_attn, "q_norm") for layer in layers]),
        "key_norm": stacked([_norm_weight(layer.self_attn, "k_norm") for layer in layers]),
    }


def _norm_weight(attention: Any, name: str) -> torch.Tensor | None:
    norm = getattr(attention, name, None)
    return None if norm is None else norm.weight


class _Packer:
    def __init__(self, weights: str, threads: int) -> None:
        self._weights, self._threads = weights, threads

    def room(self, count: int, outputs: int, length: int) -> tuple[npt.NDArray[Any], _F32]:
        """Empty panels [count, P, length, WIDTH] and their scales [count, P · WIDTH]."""
        shape, element = panels_for(outputs, length, self._weights)
        return np.zeros((count, *shape), element), np.ones((count, shape[0] * WIDTH), np.float32)

    def pack(self, linears: list[Any], panels: npt.NDArray[Any], scale: _F32) -> None:
        """The rows of all ``linears``, one behind the other."""
        weight = torch.cat([linear.weight.detach().float() for linear in linears]).contiguous()
        pack(weight.numpy(), panels, scale, self._threads)
        kept = torch.from_numpy(unpack(panels, scale, *weight.shape))
        for linear, part in zip(linears, torch.split(kept, [len(linear.weight) for linear in linears]), strict=True):
            linear.weight = nn.Parameter(part.to(linear.weight.dtype), requires_grad=False)
