"""What clients may send. Strict: nothing is converted, nothing unknown is ignored, and each refusal names its field.

Only what can be judged without the model is judged here; ``service.api.submission`` knows vocabulary, context and engines.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from service.api.formats import ResponseFormat
from service.api.problems import InvalidRequest
from service.api.request_model import NULL, UNION_MARK, RequestModel, as_parts, refuse, tell_nulls

MAX_STOPS = 16
MAX_CHOICES = 16
MAX_ALL_CHOICES = 128  #: of one request: its prompts, and ``n`` for each
_MAX_STOP_LENGTH = 1024
#: No object that may be sent has more. A million unknown names kept the event loop for 14 s, a million bad parts of a message
#: took 2.8 GB: pydantic explains each. So objects end here, and lists of objects with their first error (``fail_fast``).
_MAX_NAMES = 1024
_SHOWN = 128  #: characters of a client's own words in an answer
_INT64 = 1 << 63
MAX_DEADLINE = 366 * 86_400  #: seconds
_TOKEN_ID = re.compile(r"[0-9]{1,10}")

Metadata = dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]]

# What validators decide and pydantic cannot tell, for the OpenAPI document.
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_TOKEN_IDS: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPTS: dict[str, Any] = {
    "type": "array", "minItems": 1, "maxItems": MAX_ALL_CHOICES, "items": {"anyOf": [_TEXT, _TOKEN_IDS]},
}  # fmt: skip
_STOP: dict[str, Any] = {**_TEXT, "maxLength": _MAX_STOP_LENGTH}
_STOPS: dict[str, Any] = {"anyOf": [_STOP, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP}]}


def _checked_prompt(value: Any) -> str | list[int]:
    if isinstance(value, str):
        return value if value else refuse("the prompt is empty: give at least one token")
    if not isinstance(value, list):
        refuse("must be a string or an array of token ids")
    if not value:
        refuse("the prompt is empty: give at least one token")
    if not all(type(token) is int for token in value):  # type(), since True is an int too
        refuse("an array prompt must hold token ids (integers) only")
    return value


def _listed_prompts(value: Any) -> list[Any]:
    """One prompt, or an array of them, as an array."""
    if not isinstance(value, list) or (value and isinstance(value[0], int)):
        return [_checked_prompt(value)]
    if not value:
        refuse("the prompt is empty: give at least one token")
    if len(value) > MAX_ALL_CHOICES:
        refuse(f"at most {MAX_ALL_CHOICES} prompts in one request, got {len(value)}")
    return value


def _tell_text(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"type": "string"}, {"type": schema.pop("type"), "items": schema.pop("items")}]


def _tell_one_input(schema: dict[str, Any]) -> None:
    tell_nulls(schema)
    names = ("prompt", "messages")
    schema["oneOf"] = [
        {"required": [one], "properties": {one: {"not": NULL}, other: NULL}} for one, other in (names, reversed(names))
    ]


class Sampling(RequestModel):
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
        {},
        max_length=_MAX_NAMES,
        description="Token id -> what is added to its logit.",
        json_schema_extra={"propertyNames": {"pattern": f"^{_TOKEN_ID.pattern}$"}},
    )
    min_tokens: int = Field(0, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20, description="Log probabilities of this many tokens at each position.")
    stop: str | list[str] = Field(
        [], description=f"Up to {MAX_STOPS} strings that end the text and are not part of it.", json_schema_extra=_STOPS
    )
    ignore_eos: bool = Field(False, description="Go on to exactly max_tokens.")
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64, description="Drawn at random when left out.")

    priority: int = Field(0, ge=-100, le=100, description="Higher runs first.")
    deadline_seconds: float | None = Field(None, gt=0, le=MAX_DEADLINE, description="The job fails when it is not done by then.")

    @field_validator("logit_bias")
    @classmethod
    def _bias_by_token(cls, value: dict[str, float]) -> dict[str, float]:
        for key in value:
            if not _TOKEN_ID.fullmatch(key):
                refuse("keys must be token ids")
        return value

    @field_validator("stop", mode="plain")
    @classmethod
    def _stops(cls, value: Any) -> list[str]:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            refuse("must be a string or an array of strings")
        if len(stops) > MAX_STOPS:
            refuse(f"at most {MAX_STOPS} strings, got {len(stops)}")
        if not all(0 < len(stop) <= _MAX_STOP_LENGTH for stop in stops):
            refuse(f"each string must have 1 to {_MAX_STOP_LENGTH} characters")
        return stops

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop)


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


class Message(RequestModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: list[TextPart] = Field(fail_fast=True, json_schema_extra=_tell_text)
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _parts(cls, value: Any) -> Any:
        return as_parts(value)

    def plain(self) -> dict[str, str]:
        """As chat templates want it: one string."""
        named = {"name": self.name} if self.name is not None else {}
        return {"role": self.role, "content": "".join(part.text for part in self.content), **named}


class JobRequest(Sampling):
    """The body of ``POST /v1/jobs``."""

    model_config = ConfigDict(json_schema_extra=_tell_one_input)

    prompt: Any = Field(
        None, json_schema_extra={"anyOf": [_TEXT, _TOKEN_IDS]}, description="Text or token ids; this or `messages`."
    )
    messages: list[Message] | None = Field(
        None, min_length=1, max_length=4096, fail_fast=True, description="A chat; this or `prompt`."
    )
    max_tokens: int | None = Field(None, ge=1, description="Left out: what the context still holds.")
    response_format: ResponseFormat | None = Field(None, description="What the text must be; left out: anything.")
    metadata: Metadata = Field({}, max_length=16)

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompt(cls, value: Any) -> str | list[int]:
        return _checked_prompt(value)

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            refuse("give exactly one of prompt and messages", "one_of:prompt")
        return self


class StreamOptions(RequestModel):
    include_usage: bool = False
    include_obfuscation: bool = False  #: padding against traffic analysis: newer SDKs know the switch; we send none


class CompletionRequest(Sampling):
    """The body of ``POST /v1/completions``: OpenAI's legacy shape, with vLLM's extra sampling fields."""

    model: str
    prompt: Annotated[
        list[Annotated[Any, PlainValidator(_checked_prompt)]],
        BeforeValidator(_listed_prompts),
        WithJsonSchema({"anyOf": [_TEXT, _TOKEN_IDS, _PROMPTS]}),
    ] = Field(fail_fast=True, description="Text or token ids, or an array of such prompts, each of which gets n answers.")
    max_tokens: int = Field(16, ge=1)
    response_format: ResponseFormat | None = Field(None, description="What the text must be; left out: anything.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Accepted and not used.")
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="Answers to each prompt. The i-th of a prompt draws with seed + i.")
    best_of: int | None = Field(None, description="As many as n, or left out: none is thrown away.")
    echo: bool = Field(False, description="Each answer's text begins with its prompt's. Not together with logprobs.")
    suffix: str | None = Field(None, json_schema_extra={"maxLength": 0})

    @field_validator("best_of")
    @classmethod
    def _all_are_answered(cls, value: int, info: ValidationInfo) -> int:
        n = info.data.get("n", value)  # missing where it was refused itself
        return value if value == n else refuse(f"must be equal to n ({n}) or left out, got {value}", "unsupported_value")

    @field_validator("suffix")
    @classmethod
    def _unsupported(cls, value: Any) -> Any:
        return refuse("is not supported", "unsupported_value") if value else value

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        if (number := len(self.prompt) * self.n) > MAX_ALL_CHOICES:
            refuse(
                f"{len(self.prompt)} prompts with n {self.n} are {number} answers, and at most {MAX_ALL_CHOICES} are possible",
                "one_of:n",
            )
        return self

    @model_validator(mode="after")
    def _prompts_have_no_logprobs(self) -> Self:
        if self.echo and self.logprobs is not None:
            refuse("not together with echo: those of the prompt are not kept", "one_of:logprobs")
        return self

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            refuse("only together with stream: true", "one_of:stream_options")
        return self


# --- from bytes to a checked request -------------------------------------------------------------------------------------


def parse_json(body: bytes) -> dict[str, Any]:
    """The body as a JSON object, without names given twice or lone surrogates, which ``json`` lets through.

    It lets NaN and Infinity through, too; those are refused by the models, which can name the field.
    """
    try:
        value = json.loads(body, object_pairs_hook=_checked_object)
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


def _checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > _MAX_NAMES:
        raise ValueError(f"an object has {len(pairs)} names, and at most {_MAX_NAMES} are possible")
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {_printable(twice)!r} is given twice")
    return found


def _printable(name: str) -> str:
    return name.encode(errors="replace").decode()[:_SHOWN]


_Model = TypeVar("_Model", bound=RequestModel)


def validate(model: type[_Model], values: Mapping[str, Any]) -> _Model:
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
    # "[key]" is pydantic's own mark: the key is at fault, not the value.
    steps = [step for step in location if step != "[key]" and not str(step).startswith(UNION_MARK)]
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")[:_SHOWN] or None
    if kind.startswith("one_of:"):
        name = kind.removeprefix("one_of:")
        return f"{param}.{name}" if param else name, message, "invalid_value"
    if kind == "extra_forbidden":
        return param, "this field is not known here", "unknown_field"
    if kind == "missing":
        return param, "this field is required", "missing_field"
    code = kind if kind == "unsupported_value" else "invalid_value"
    return param, message[:1].lower() + message[1:], code
