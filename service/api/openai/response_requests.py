"""What clients may send to ``/v1/responses``: fields that would change the text and are not supported are refused by name."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from service.api.formats import TextFormat
from service.api.openai.tools import MAX_TOOLS, Function, ToolName, ToolUse, problem_with, tool_use
from service.api.request_model import NULL, UNION_MARK, RequestModel, as_parts, refuse
from service.api.schemas import Metadata, Sampling

MAX_ITEMS = 4096  #: of one conversation, what came before included
_MAX_LABEL = 512  #: characters of what is only given back
LOGPROBS = "message.output_text.logprobs"
#: All but the first would add to items that no response here has: to ask for them changes nothing.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
INCLUDABLE: tuple[str, ...] = get_args(Includable)


class ContentPart(RequestModel):
    """``annotations`` and ``logprobs`` come with parts of an answer that is sent back; nothing is read off them."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def _tell_content(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"type": "string"}, {"type": schema.pop("type"), "items": schema.pop("items")}]


def _tell_input(schema: dict[str, Any]) -> None:
    items = {name: schema.pop(name) for name in ("type", "items", "minItems", "maxItems")}
    schema["anyOf"] = [{"type": "string"}, items]


def _parts(value: Any) -> Any:
    return as_parts(value, "input_text")


_Content = Annotated[list[ContentPart], Field(fail_fast=True, json_schema_extra=_tell_content), BeforeValidator(_parts)]
_Id = Annotated[str | None, Field(max_length=_MAX_LABEL, description="Accepted and not used.")]
_CallId = Annotated[str, Field(min_length=1, max_length=128)]
_Status = Literal["in_progress", "completed", "incomplete"]


class InputMessage(RequestModel):
    """A message, or an answer sent back: those have an ``id``, a ``status`` and a ``phase``."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content
    id: _Id = None
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class InputCall(RequestModel):
    """A call of an earlier answer, sent back."""

    type: Literal["function_call"]
    call_id: _CallId
    name: ToolName
    arguments: str = Field(description="JSON.")
    id: _Id = None
    status: _Status | None = None


class InputCallOutput(RequestModel):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: _CallId
    output: _Content
    id: _Id = None
    status: _Status | None = None


class SummaryText(RequestModel):
    type: Literal["summary_text"]
    text: str


class ReasoningText(RequestModel):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(RequestModel):
    """Reasoning of an earlier answer, sent back: for templates that show it again."""

    type: Literal["reasoning"]
    content: list[ReasoningText] = Field([], fail_fast=True)
    summary: list[SummaryText] = Field([], fail_fast=True, description="Accepted and not used.")
    encrypted_content: None = None
    id: _Id = None
    status: _Status | None = None


_ITEMS = ("function_call", "function_call_output", "reasoning")


def _kind_of(item: Any) -> str:
    """A message need not say that it is one, and says best what is wrong with what is no item at all."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return UNION_MARK + (kind if kind in _ITEMS else "message")


InputItem = Annotated[
    Annotated[InputMessage, Tag(f"{UNION_MARK}message")]
    | Annotated[InputCall, Tag(f"{UNION_MARK}function_call")]
    | Annotated[InputCallOutput, Tag(f"{UNION_MARK}function_call_output")]
    | Annotated[InputReasoning, Tag(f"{UNION_MARK}reasoning")],
    Discriminator(_kind_of),
]


class FunctionTool(Function):
    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _is_a_function(cls, values: Any) -> Any:
        """Tools of other types have other fields: that those are unknown is not what is wrong with them."""
        if isinstance(values, dict) and values.get("type", "function") != "function":
            refuse("only tools of type 'function' are supported", "one_of:type")
        return values


class NamedFunction(RequestModel):
    type: Literal["function"]
    name: ToolName


class TextConfig(RequestModel):
    format: TextFormat = TextFormat(type="text")
    verbosity: Literal["medium"] = "medium"


class Reasoning(RequestModel):
    effort: Literal["none"] | None = None
    summary: None = None


class ResponseStreamOptions(RequestModel):
    include_obfuscation: bool = Field(False, description="Padding against traffic analysis: none is sent.")


class ResponseRequest(Sampling):
    """The body of ``POST /v1/responses``, with the native API's extra sampling fields."""

    input: list[InputItem] = Field(
        min_length=1, max_length=MAX_ITEMS, fail_fast=True, json_schema_extra=_tell_input, description="Text, or items."
    )
    instructions: str | None = Field(None, description="A system message for this response alone.")
    previous_response_id: str | None = Field(None, max_length=_MAX_LABEL, description="The conversation to go on with.")
    background: bool = Field(False, description="Answer at once; the response goes on without its client.")
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    store: bool = Field(True, description="False: deleted once it is answered.")
    max_output_tokens: int | None = Field(None, ge=1, description="Left out: what the context still holds.")
    text: TextConfig = TextConfig()
    include: list[Includable] = Field([], max_length=16, fail_fast=True)
    top_logprobs: int = Field(0, ge=0, le=20, description=f"Shown with include: {LOGPROBS}.")
    logprobs: int | None = Field(None, json_schema_extra=NULL)
    metadata: Metadata = Field({}, max_length=16)
    truncation: Literal["disabled"] = "disabled"
    tools: list[FunctionTool] = Field([], max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Literal["auto", "none", "required"] | NamedFunction = "auto"
    parallel_tool_calls: bool = Field(True, description="False: one call at most.")
    max_tool_calls: int | None = Field(None, ge=1)
    reasoning: Reasoning = Reasoning()
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = Field(None, max_length=_MAX_LABEL)
    safety_identifier: str | None = Field(None, max_length=_MAX_LABEL)
    prompt_cache_key: str | None = Field(None, max_length=_MAX_LABEL)
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _messages(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        return value if isinstance(value, list) else refuse("must be a string or an array of items")

    @field_validator("logprobs", mode="before")
    @classmethod
    def _by_openais_names(cls, value: Any) -> Any:
        return refuse(f"ask with include: [{LOGPROBS!r}] and top_logprobs", "unsupported_value")

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.background and not self.store:
            refuse("a background response is fetched by its id: leave store at true", "one_of:background")
        if self.stream_options is not None and not self.stream:
            refuse("only together with stream: true", "one_of:stream_options")
        if (problem := problem_with(self.tools, self._choice, self._named)) is not None:
            field, what = problem
            refuse(what, f"one_of:{field}")
        return self

    @property
    def _choice(self) -> str | None:
        """ "auto" is what is meant without tools, too."""
        return self.tool_choice if isinstance(self.tool_choice, str) and self.tool_choice != "auto" else None

    @property
    def _named(self) -> str | None:
        return self.tool_choice.name if isinstance(self.tool_choice, NamedFunction) else None

    @property
    def tool_use(self) -> ToolUse:
        return tool_use(self.tools, self._choice, self._named, parallel=self.parallel_tool_calls, place="tools[{}]")

    @property
    def shown_logprobs(self) -> int | None:
        """How many at each token, besides its own; None: none, not even that."""
        return self.top_logprobs if LOGPROBS in self.include else None
