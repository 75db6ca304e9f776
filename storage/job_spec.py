"""What a client asked for, as stored: canonical JSON, so that equal jobs have equal bytes (the chain hash starts from them)."""

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

#: Fields of later versions: left out while empty, so that equal jobs keep equal bytes and an earlier version runs the jobs that do
#: without. What an empty one means never changes once it was released.
_ADDED = ("grammar", "request")


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
    kind: str = "job"  #: which surface made it: "job", "completion", "chat", "response"
    grammar: str = ""  #: what the tokens may be, as llguidance's grammar in JSON; empty: anything
    #: What the surface must give back of the request and no engine looks at: JSON values by name.
    request: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        values = asdict(self)
        for name in _ADDED:
            if not values[name]:
                del values[name]
        return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "JobSpec":
        """What this version knows of it: enough to show the job. Who runs it asks for ``unknown_fields`` first."""
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {name: value for name, value in json.loads(text).items() if name in known}
        values["logit_bias"] = {int(token): float(bias) for token, bias in values.get("logit_bias", {}).items()}
        values["stop"] = tuple(values.get("stop", ()))
        return cls(**values)


def unknown_fields(text: str) -> list[str]:
    """What a newer version asked for in this spec: without it the job would get other tokens than were promised."""
    return sorted(json.loads(text).keys() - {f.name for f in fields(JobSpec)})
