"""How much memory a model's weights and pages take, from its files alone: no torch."""

import json
from dataclasses import dataclass
from pathlib import Path

from service.errors import ServiceError

_BYTES_PER_NUMBER = 4  #: float32, whatever the files hold


class ModelUnreadable(ServiceError):
    """config.json or the weights' headers cannot be read."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    weights: int  #: bytes, once loaded as float32
    numbers_per_token: int  #: K and V of all layers

    def page_bytes(self, page_size: int) -> int:
        return self.numbers_per_token * page_size * _BYTES_PER_NUMBER


def model_size(folder: Path) -> ModelSize:
    """Raises ModelUnreadable."""
    try:
        config = json.loads((folder / "config.json").read_text())
        config |= config.get("text_config", {})
        layers = config.get("num_hidden_layers") or config["n_layer"]
        heads = config.get("num_attention_heads") or config["n_head"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or (config.get("hidden_size") or config["n_embd"]) // heads
        weights = sum(_numbers(path) for path in folder.glob("*.safetensors")) * _BYTES_PER_NUMBER
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelUnreadable(f"cannot read the model in {folder}: {error!r}", "check --model") from error
    return ModelSize(weights, 2 * layers * kv_heads * head_dim)


def _numbers(path: Path) -> int:
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    count = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            size = 1
            for dimension in tensor["shape"]:
                size *= dimension
            count += size
    return count
