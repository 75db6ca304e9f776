"""What a client may ask of the text's form, and the grammar that gives it: OpenAI's two spellings of one thing.

Chat Completions' ``response_format`` holds a JSON schema one level deeper than Responses' ``text.format``. Ours are ``regex``
and ``grammar``, and that a format may be asked for wherever text is made.
"""

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from llguidance import LLMatcher
from pydantic import ConfigDict, Field, model_validator

from engine.errors import GrammarFailed
from engine.grammar import Grammars
from service.api.problems import InvalidRequest
from service.api.request_model import NULL, RequestModel, refuse, tell_nulls

#: Characters of a schema, regex or grammar. An object of more than 1,024 names is none (``parse_json``): compiling takes the square
#: of them, 0.07 s for 1,000 and 6.6 s for 10,000.
MAX_LENGTH = 1 << 16
#: The shortest JSON there is. With white space where JSON allows it, a model may give blanks for ever.
_JSON_OPTIONS: Any = {"whitespace_flexible": False}
_SETTINGS = "x-guidance"  #: llguidance would take settings of its own from a schema

Json = dict[str, Any]
_Types = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]  #: type: the fields that it needs, and those that it may have
_TYPES: _Types = {
    "text": ((), ()),
    "json_object": ((), ()),
    "regex": (("regex",), ()),
    "grammar": (("grammar",), ()),
}
_ALL_KEPT = "A JSON schema; all of it is kept, or it is refused."
_Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$", description="For the client's own use.")]
_Strict = Annotated[bool | None, Field(description="A schema is kept in any case.")]
_Text = Annotated[str | None, Field(min_length=1, max_length=MAX_LENGTH)]


def _tell_types(schema: dict[str, Any], types: _Types) -> None:
    tell_nulls(schema)
    names = schema["properties"].keys() - {"type"}
    schema["oneOf"] = [
        {
            "properties": {
                "type": {"const": kind},
                **{name: {"not": NULL} for name in sorted(required)},
                **dict.fromkeys(sorted(names.difference(required, optional)), NULL),
            },
            "required": ["type", *required],
        }
        for kind, (required, optional) in types.items()
    ]


class _Format(RequestModel):
    types: ClassVar[_Types]

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    regex: _Text = Field(None, description="With type regex: an expression that the whole text matches (Rust's syntax).")
    grammar: _Text = Field(None, description="With type grammar: llguidance's dialect of Lark.")

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> Self:
        given = {type(self).model_fields[name].alias or name for name in self.model_fields_set} - {"type"}
        required, optional = self.types[self.type]
        for name in required:
            if name not in given:
                refuse(f"is required with type {self.type!r}", f"one_of:{name}")
        for name in sorted(given.difference(required, optional)):
            refuse(f"does not go with type {self.type!r}", f"one_of:{name}")
        return self


class JsonSchema(RequestModel):
    name: _Name
    schema_: dict[str, Any] = Field(alias="schema", description=_ALL_KEPT)
    strict: _Strict = None
    description: str | None = None


class ResponseFormat(_Format):
    """As Chat Completions has it."""

    types: ClassVar[_Types] = {**_TYPES, "json_schema": (("json_schema",), ())}
    model_config = ConfigDict(json_schema_extra=lambda schema: _tell_types(schema, ResponseFormat.types))

    json_schema: JsonSchema | None = None

    @property
    def schema_and_place(self) -> tuple[dict[str, Any] | None, str]:
        return (self.json_schema.schema_ if self.json_schema is not None else None), "json_schema.schema"


class TextFormat(_Format):
    """As Responses has it: a JSON schema lies beside its type."""

    types: ClassVar[_Types] = {**_TYPES, "json_schema": (("name", "schema"), ("strict", "description"))}
    model_config = ConfigDict(json_schema_extra=lambda schema: _tell_types(schema, TextFormat.types))

    name: _Name | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description=_ALL_KEPT)
    strict: _Strict = None
    description: str | None = None

    @property
    def schema_and_place(self) -> tuple[dict[str, Any] | None, str]:
        return self.schema_, "schema"


def grammar_of(wanted: ResponseFormat | TextFormat | None, grammars: Grammars, field: str = "response_format") -> str:
    """``JobSpec.grammar``: empty where anything may be said. Compiles it as an engine will, so this may take a tenth of a second:
    not for the event loop.

    Raises InvalidRequest that names the place below ``field`` and what is wrong there.
    """
    if wanted is None or wanted.type == "text":
        return ""
    place = f"{field}.{wanted.type}"
    if wanted.type == "json_schema":
        schema, below = wanted.schema_and_place
        place = f"{field}.{below}"
        check_schema(schema, place)
    try:
        grammar = _grammar(wanted)
        grammars.begin(grammar)
    except (GrammarFailed, ValueError) as error:  # ValueError: a number that fits into no float
        raise InvalidRequest(f"{place}: {error}", param=place) from None
    return grammar


def form_of(wanted: ResponseFormat | TextFormat, grammars: Grammars, field: str) -> Json:
    """The same as a part of a larger grammar. Raises as ``grammar_of`` does."""
    form: Json = json.loads(grammar_of(wanted, grammars, field))["grammars"][0]
    return form


def _grammar(wanted: ResponseFormat | TextFormat) -> str:
    if wanted.type == "regex":
        return LLMatcher.grammar_from_regex(wanted.regex or "")
    if wanted.type == "grammar":
        return to_json({"grammars": [{"lark_grammar": wanted.grammar}]})
    schema, _ = ({"type": "object"}, "") if wanted.type == "json_object" else wanted.schema_and_place
    return LLMatcher.grammar_from_json_schema(to_json(schema), overrides=_JSON_OPTIONS)


def to_json(value: Any) -> str:
    """In the order of its names: that of a schema's properties is the answer's."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def check_schema(schema: dict[str, Any] | None, place: str) -> None:
    if schema is not None and _SETTINGS in schema:
        raise InvalidRequest(f"{place}.{_SETTINGS}: is for this server to set", param=f"{place}.{_SETTINGS}")
    try:
        length = len(to_json(schema))
    except ValueError:
        raise InvalidRequest(f"{place}: NaN and Infinity are no JSON", param=place) from None
    if length > MAX_LENGTH:
        raise InvalidRequest(f"{place}: {length} characters are more than the {MAX_LENGTH} that are taken", param=place)
