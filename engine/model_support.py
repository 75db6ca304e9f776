"""Which models we refuse, and why. Silence here is how others serve garbage."""

from typing import Any

from engine.calls import ObserveCall
from engine.errors import UnsupportedModel

# Named ahead of loading, so that nobody waits for gigabytes to hear it. (field, what the model needs)
_REFUSED: dict[str, tuple[str, str]] = {
    "bloom": ("alibi", "a position bias (ALiBi) in its own attention, which never calls ours"),
    "mpt": ("alibi", "a position bias (ALiBi) in its own attention"),
    "gemma2": ("softcap", "soft-capped attention scores and sliding windows"),
    "gemma3_text": ("sliding_window", "sliding windows"),
    "gpt_oss": ("s_aux", "attention sinks and sliding windows"),
}
# These choose their frequencies by the longest position of a call, so a row would depend on its neighbours.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_STATEFUL_LAYERS = ("linear", "mamba", "conv", "recurrent", "rwkv")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# What paged flash attention computes on a device.
_HEAD_DIM_STEP, _LARGEST_HEAD_DIM = 8, 256


def refuse_by_config(config: Any, name: str, *, on_cpu: bool = True) -> None:
    """Raise ``UnsupportedModel`` for what config.json alone tells."""
    kind = str(config.model_type)
    label = (config.architectures or [kind])[0]

    def refuse(field: str, why: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{label} ({kind}) is not supported: {why}", "its text would be wrong, so it is refused", name=name, field=field
        )

    if kind in _REFUSED:
        field, needs = _REFUSED[kind]
        raise refuse(field, f"it needs {needs}")
    if config.is_encoder_decoder:
        raise refuse("is_encoder_decoder", "it is an encoder-decoder, and only causal models are served")
    if getattr(config, "quantization_config", None) is not None:
        raise refuse("quantization_config", "its weights are quantised in a form that we do not read")
    text = config.get_text_config()
    if stateful := [layer for layer in getattr(text, "layer_types", None) or [] if any(part in layer for part in _STATEFUL_LAYERS)]:
        raise refuse("layer_types", f"its layers of kind {stateful[0]} keep state beyond paged keys and values")
    if _is_stateful(config):
        raise refuse("model_type", "it keeps state beyond paged keys and values (recurrent or hybrid)")
    context = getattr(text, "max_position_embeddings", None)
    if context is None:
        raise refuse("max_position_embeddings", "its config names no longest context")
    _refuse_rope(text, context, refuse)
    if not on_cpu and (experts := [field for field in _EXPERTS if (getattr(text, field, None) or 0) > 1]):
        raise refuse(
            experts[0],
            "a device computes its experts on as many rows as chose them, so a row's bits would depend on the others; the cpu "
            "serves it",
        )


def _is_stateful(config: Any) -> bool:
    """transformers marks the classes of recurrent and hybrid models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return bool(getattr(found, "_is_stateful", False))


def _refuse_rope(text: Any, context: int, refuse: Any) -> None:
    rope = getattr(text, "rope_parameters", None) or {}
    for settings in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = settings.get("rope_type", "default")
        original = (
            settings.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None) or context
        )
        if kind in _BATCH_DEPENDENT_ROPE and (kind == "dynamic" or original < context):
            raise refuse("rope_type", f"rotary embedding {kind} depends on the longest sequence of a batch")


def refuse_by_observation(seen: ObserveCall, num_layers: int, max_context: int, architecture: str, *, on_cpu: bool = True) -> None:
    """Raise ``UnsupportedModel`` for what one forward pass showed."""

    def refuse(field: str, why: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{architecture} is not supported: {why}", "its text would be wrong, so it is refused", name=architecture, field=field
        )

    if sorted(seen.layers) != list(range(num_layers)):
        raise refuse("attention", f"its {num_layers} layers called our attention for layers {sorted(seen.layers)}")
    if len(set(seen.shapes)) > 1:
        raise refuse("num_key_value_heads", f"its layers differ in heads or head dim: {sorted(set(seen.shapes))}")
    _, key_dim, value_dim = seen.shapes[0]
    if not on_cpu and (key_dim % _HEAD_DIM_STEP or key_dim > _LARGEST_HEAD_DIM):
        raise refuse(
            "head_dim",
            f"its heads have {key_dim} dimensions, and attention on a device takes multiples of {_HEAD_DIM_STEP} up to "
            f"{_LARGEST_HEAD_DIM}",
        )
    if key_dim != value_dim:
        raise refuse("v_head_dim", f"keys have {key_dim} dimensions per head, values {value_dim}")
    if short := sorted({window for window in seen.windows if window is not None and window < max_context}):
        raise refuse("sliding_window", f"a sliding window of {short[0]} tokens is shorter than the context of {max_context}")
