"""What a client asked for, as stored: canonical JSON, so that equal jobs have equal bytes (the chain hash starts from them)."""

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Values are validated at the edge (the api), here only carried. ``seed`` is always set: the api draws one if need be."""

    model: str
    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    kind: str = "job"  #: which surface made it: "job", "completion"

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "JobSpec":
        values: dict[str, Any] = json.loads(text)
        unknown = values.keys() - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"job spec has fields this version does not know: {', '.join(sorted(unknown))}")
        values["logit_bias"] = {int(token): float(bias) for token, bias in values.get("logit_bias", {}).items()}
        values["stop"] = tuple(values.get("stop", ()))
        return cls(**values)
