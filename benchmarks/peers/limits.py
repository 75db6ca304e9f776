"""What the machine allows: how fast weights and keys and values can be read, and how fast fp32 products can be summed.

A decode step reads every weight once and the keys and values of every token of each sequence: no engine is faster than memory lets
it read them. With fp32 weights it is no faster than its fp32 arithmetic either. Prefill is held against fp32 arithmetic alone,
whatever the weights: an engine that multiplies in bf16 or int8 may exceed that.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.cases import Case


@dataclass(frozen=True)
class Machine:
    """Measured in this round, with all threads."""

    bytes_per_s: float  #: read from memory, far beyond the caches
    flops_per_s: float  #: fp32, a multiply-add counts as two


@dataclass(frozen=True)
class Shape:
    """Of a dense decoder model. Numbers of weights, not bytes."""

    weights: int  #: all, a matrix that is both embedding and output counted once
    embedding: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def read(cls, folder: Path) -> "Shape":
        """From config.json and the header of model.safetensors."""
        config = json.loads((folder / "config.json").read_text())
        with (folder / "model.safetensors").open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        sizes = {name: math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}
        return cls(
            weights=sum(sizes.values()),
            embedding=config["vocab_size"] * config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
        )

    @property
    def kv_values(self) -> int:
        """Keys and values of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def flops(self, attended: float) -> float:
        """Of one token that looks at ``attended`` tokens, without its logits."""
        attention = 2 * self.num_layers * self.num_heads * self.head_dim * attended
        return 2.0 * (self.weights - self.embedding + attention)


@dataclass(frozen=True)
class Reads:
    """What a peer reads in a step: its weights once (bytes), keys and values of each token (bytes)."""

    weights: float
    kv_per_token: float
    fp32: bool


def limit(case: Case, shape: Shape, reads: Reads, machine: Machine) -> float:
    """tok/s that ``machine`` allows a peer."""
    if case.is_prefill:
        flops = case.context * shape.flops((case.context + 1) / 2) + 2 * shape.embedding
        return case.context * machine.flops_per_s / flops
    attended = case.context + case.new_tokens / 2
    seconds = (reads.weights + case.batch * attended * reads.kv_per_token) / machine.bytes_per_s
    if reads.fp32:
        flops = case.batch * (shape.flops(attended) + 2 * shape.embedding)
        seconds = max(seconds, flops / machine.flops_per_s)
    return case.batch / seconds
