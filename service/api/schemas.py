"""What clients may send. Strict: nothing is converted, nothing unknown is ignored, and each refusal names its field.

Only what can be judged without the model is judged here; ``service.api.submission`` knows vocabulary, context and engines.
"""

import json
import re
from typing import Annotated, Any, Literal, NoReturn, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from service.api.problems import InvalidRequest

MAX_STOPS = 16
MAX_CHOICES = 16
_MAX_STOP_LENGTH = 1024
_INT64 = 1 << 63
_YEAR = 366 * 86_400
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_TOKEN_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string"}, _TOKEN_IDS]}
_CONTENT_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array"}]}


def _refuse(message: str, code: str = "invalid_value") -> NoReturn:
    # Jinja-like braces in a message would be taken for pydantic's own placeholders.
    raise PydanticCustomError(code, "{reason}", {"reason": message})


def _checked_prompt(value: Any) -> str | list[int]:
    if isinstance(value, str):
        return value if value else _refuse("the prompt is empty: give at least one token")
    if not isinstance(value, list):
        _refuse("must be a string or an array of token ids")
    if not value:
        _refuse("the prompt is empty: give at least one token")
    if not all(type(token) is int for token in value):  # type(), since True is an int too
        _refuse("an array prompt must hold token ids (integers) only")
    return value


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: Any) -> Any:
        """OpenAI's clients send null for "not given"."""
        return {key: value for key, value in values.items() if value is not None} if isinstance(values, dict) else values


class Sampling(_Request):
    """The fields that all ways of making a job share."""

    model: str | None = Field(None, description="The served model; may be left out.")
    temperature: float = Field(1.0, ge=0, le=2, description="0 takes the most likely token.")
    top_k: int = Field(0, ge=-1, lt=1 << 31, description="0 or -1: all tokens.")
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(
        {}, max_length=1024, description="Token id -> what is added to its logit."
    )
    min_tokens: int = Field(0, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20, description="Log probabilities of this many tokens at each position.")
    stop: str | list[str] = Field([], description=f"Up to {MAX_STOPS} strings that end the text and are not part of it.")
    ignore_eos: bool = Field(False, description="Go on to exactly max_tokens.")
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64, description="Drawn at random when left out.")

    @field_validator("logit_bias")
    @classmethod
    def _bias_by_token(cls, value: dict[str, float]) -> dict[str, float]:
        for key in value:
            if not _TOKEN_ID.fullmatch(key):
                _refuse("keys must be token ids")
        return value

    @field_validator("stop", mode="plain")
    @classmethod
    def _stops(cls, value: Any) -> list[str]:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            _refuse("must be a string or an array of strings")
        if len(stops) > MAX_STOPS:
            _refuse(f"at most {MAX_STOPS} strings, got {len(stops)}")
        if not all(0 < len(stop) <= _MAX_STOP_LENGTH for stop in stops):
            _refuse(f"each string must have 1 to {_MAX_STOP_LENGTH} characters")
        return stops

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop)


class TextPart(_Request):
    type: Literal["text"]
    text: str


class Message(_Request):
    role: Literal["system", "user", "assistant", "tool"]
    content: list[TextPart] = Field(json_schema_extra=_CONTENT_SCHEMA)
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _parts(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        return value if isinstance(value, list) else _refuse("must be a string or an array of text parts")

    def plain(self) -> dict[str, str]:
        """As chat templates want it: one string."""
        named = {"name": self.name} if self.name is not None else {}
        return {"role": self.role, "content": "".join(part.text for part in self.content), **named}


class JobRequest(Sampling):
    """The body of ``POST /v1/jobs``."""

    prompt: Any = Field(None, json_schema_extra=_PROMPT_SCHEMA, description="Text or token ids; this or `messages`.")
    messages: list[Message] | None = Field(None, min_length=1, max_length=4096, description="A chat; this or `prompt`.")
    max_tokens: int | None = Field(None, ge=1, description="Left out: what the context still holds.")
    priority: int = Field(0, ge=-100, le=100, description="Higher runs first.")
    deadline_seconds: float | None = Field(None, gt=0, le=_YEAR, description="The job fails when it is not done by then.")
    metadata: dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]] = Field(
        {}, max_length=16
    )

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompt(cls, value: Any) -> str | list[int]:
        return _checked_prompt(value)

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            _refuse("give exactly one of prompt and messages", "one_of:prompt")
        return self


class StreamOptions(_Request):
    include_usage: bool = False
    include_obfuscation: bool = False  #: padding against traffic analysis: newer SDKs know the switch; we send none


class CompletionRequest(Sampling):
    """The body of ``POST /v1/completions``: OpenAI's legacy shape, with vLLM's extra sampling fields."""

    model: str
    prompt: Any = Field(json_schema_extra=_PROMPT_SCHEMA, description="Text, token ids, or an array holding one of these.")
    max_tokens: int = Field(16, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Accepted and not used.")
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="Answers to the one prompt. Choice i draws with seed + i.")
    best_of: int | None = Field(None, description="As many as n, or left out: none is thrown away.")
    echo: bool = False
    suffix: str | None = None

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompt(cls, value: Any) -> str | list[int]:
        if isinstance(value, list) and value and not isinstance(value[0], int):
            if len(value) > 1:
                _refuse(f"one prompt for each request, got {len(value)}", "unsupported_value")
            value = value[0]
        return _checked_prompt(value)

    @field_validator("best_of")
    @classmethod
    def _all_are_answered(cls, value: int, info: ValidationInfo) -> int:
        n = info.data.get("n", value)  # missing where it was refused itself
        return value if value == n else _refuse(f"must be equal to n ({n}) or left out, got {value}", "unsupported_value")

    @field_validator("echo", "suffix")
    @classmethod
    def _unsupported(cls, value: Any) -> Any:
        return _refuse("is not supported", "unsupported_value") if value else value

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            _refuse("only together with stream: true", "one_of:stream_options")
        return self


# --- from bytes to a checked request -------------------------------------------------------------------------------------


def parse_json(body: bytes) -> dict[str, Any]:
    """The body as a JSON object, without names given twice or lone surrogates, which ``json`` lets through.

    It lets NaN and Infinity through, too; those are refused by the models, which can name the field.
    """
    try:
        value = json.loads(body, object_pairs_hook=_refuse_duplicates)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError among them
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    for name, content in value.items():
        try:
            json.dumps([name, content], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            shown = _printable(name)
            raise InvalidRequest(f"{shown}: holds half of a surrogate pair, which is no text", param=shown) from None
    return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {_printable(twice)!r} is given twice")
    return found


def _printable(name: str) -> str:
    return name.encode(errors="replace").decode()[:64]


_Model = TypeVar("_Model", bound=_Request)


def validate(model: type[_Model], values: dict[str, Any]) -> _Model:
    """Raises InvalidRequest that names the first field at fault; ``errors`` lists all."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        found = [_explain(detail["loc"], detail["type"], detail["msg"]) for detail in error.errors(include_url=False)]
    param, message, code = found[0]
    where = f"{param}: " if param else ""
    listed = [{"param": name, "message": text} for name, text, _ in found[:20]]
    raise InvalidRequest(f"{where}{message}", param=param, code=code, errors=listed)


def _explain(location: tuple[int | str, ...], kind: str, message: str) -> tuple[str | None, str, str]:
    """(field, message, code)"""
    steps = [step for step in location if step != "[key]"]  # pydantic's own mark: the key is at fault, not the value
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".") or None
    if kind.startswith("one_of:"):
        return kind.removeprefix("one_of:"), message, "invalid_value"
    if kind == "extra_forbidden":
        return param, "this field is not known here", "unknown_field"
    if kind == "missing":
        return param, "this field is required", "missing_field"
    code = kind if kind == "unsupported_value" else "invalid_value"
    return param, message[:1].lower() + message[1:], code
