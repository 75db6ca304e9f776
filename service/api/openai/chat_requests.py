"""What ``/v1/chat/completions`` takes: what OpenAI has besides and cannot change the text, too; the rest is refused by name."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from service.api.formats import ResponseFormat
from service.api.openai.tools import MAX_TOOLS, Function, ToolName, ToolUse, problem_with, tool_use
from service.api.request_model import RequestModel, as_parts, refuse
from service.api.schemas import MAX_CHOICES, Metadata, Sampling, StreamOptions, TextPart

_MAX_MESSAGES = 4096
_MAX_CALLS = 128
_Id = Annotated[str, Field(min_length=1, max_length=128)]
_Label = Annotated[str | None, Field(max_length=512)]


def _tell_content(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"type": "string"}, {"type": "array", "items": schema.pop("items")}]
    del schema["type"]


def parsed_arguments(written: str) -> Any:
    """Templates write arguments as JSON themselves. What the model once wrote and is none goes as it is."""
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return written


class CalledFunction(RequestModel):
    name: ToolName
    arguments: str = Field(description="JSON.")


class ToolCall(RequestModel):
    id: _Id
    type: Literal["function"]
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": parsed_arguments(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}


class ChatMessage(RequestModel):
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: list[TextPart] = Field([], fail_fast=True, json_schema_extra=_tell_content)
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, min_length=1, max_length=_MAX_CALLS, fail_fast=True)
    tool_call_id: _Id | None = Field(None, description="Of a tool's message: the call that it answers.")
    reasoning_content: str | None = Field(None, description="Of the assistant: for templates that show it again.")
    refusal: None = None

    @field_validator("content", mode="before")
    @classmethod
    def _parts(cls, value: Any) -> Any:
        return as_parts(value)

    @model_validator(mode="after")
    def _has_what_its_role_needs(self) -> Self:
        if self.role == "tool" and self.tool_call_id is None:
            refuse("is required of a tool's message", "one_of:tool_call_id")
        if self.role != "tool" and self.tool_call_id is not None:
            refuse("is for messages of role 'tool'", "one_of:tool_call_id")
        for name in ("tool_calls", "reasoning_content"):
            if self.role != "assistant" and getattr(self, name) is not None:
                refuse("is for messages of role 'assistant'", f"one_of:{name}")
        if not self.tool_calls and "content" not in self.model_fields_set:
            refuse("is required", "one_of:content")
        return self

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)

    def for_template(self, developer: str) -> dict[str, Any]:
        """``developer``: what the model's template calls that role."""
        message: dict[str, Any] = {"role": developer if self.role == "developer" else self.role, "content": self.text}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class Tool(RequestModel):
    type: Literal["function"]
    function: Function


class NamedFunction(RequestModel):
    name: ToolName


class NamedTool(RequestModel):
    type: Literal["function"]
    function: NamedFunction


class TemplateSwitches(RequestModel):
    """Of the model's chat template. Not whatever it may ask for: a template's variables are no input of clients."""

    enable_thinking: bool | None = None


class ChatUpdate(RequestModel):
    """The body of ``POST /v1/chat/completions/{id}``."""

    metadata: Metadata = Field(max_length=16)


class ChatRequest(Sampling):
    """The body of ``POST /v1/chat/completions``, with vLLM's extra sampling fields."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, description="Left out: what the context still holds.")
    max_tokens: int | None = Field(None, ge=1, description="OpenAI's earlier name for the same.")
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="Answers to the one chat. Choice i draws with seed + i.")
    logprobs: bool = Field(False, description="Log probabilities of each token.")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="And of this many others; needs logprobs.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, min_length=1, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = Field(True, description="False: one call at most.")
    chat_template_kwargs: TemplateSwitches | None = None
    store: bool = Field(False, description="Keep it, to be listed and fetched again.")
    metadata: Metadata = Field({}, max_length=16)
    # What cannot change the text:
    user: _Label = None
    safety_identifier: _Label = None
    prompt_cache_key: _Label = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = Field(None, max_length=1)

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            refuse("only together with stream: true", "one_of:stream_options")
        if self.top_logprobs is not None and not self.logprobs:
            refuse("only together with logprobs: true", "one_of:top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            refuse("differs from max_completion_tokens: give one of them", "one_of:max_tokens")
        return self._check_tools()

    def _check_tools(self) -> Self:
        problem = problem_with(self._functions, self._choice, self._named)
        if problem is not None:
            field, what = problem
            refuse(what, f"one_of:{field}")
        return self

    @property
    def _functions(self) -> list[Function]:
        return [tool.function for tool in self.tools or ()]

    @property
    def _choice(self) -> str | None:
        return self.tool_choice if isinstance(self.tool_choice, str) else None

    @property
    def _named(self) -> str | None:
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def tool_use(self) -> ToolUse:
        return tool_use(self._functions, self._choice, self._named, parallel=self.parallel_tool_calls, place="tools[{}].function")

    @property
    def template_switches(self) -> dict[str, bool]:
        return self.chat_template_kwargs.model_dump(exclude_none=True) if self.chat_template_kwargs is not None else {}

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None and self.max_tokens is not None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
