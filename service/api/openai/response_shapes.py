"""What clients of ``/v1/responses`` get, as models: for the OpenAPI document, as in ``service.api.shapes``."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from service.api.shapes import Recovery
from storage.records import JobStatus


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TopLogprob(_Shape):
    token: str
    bytes: list[int]
    logprob: float


class TextLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class InputText(_Shape):
    type: Literal["input_text"]
    text: str


class OutputText(_Shape):
    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0)
    logprobs: list[TextLogprob]


class OutputMessage(_Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class ReasoningText(_Shape):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(_Shape):
    id: str
    type: Literal["reasoning"]
    summary: list[Any] = Field(max_length=0)
    content: list[ReasoningText]
    status: Literal["in_progress", "completed", "incomplete"]


class OutputCall(_Shape):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="JSON as the model wrote it: it may be none.")
    status: Literal["in_progress", "completed", "incomplete"]


OutputItem = Annotated[OutputMessage | OutputReasoning | OutputCall, Field(discriminator="type")]


class GivenMessage(_Shape):
    id: str
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    status: Literal["completed"]
    content: list[Annotated[InputText | OutputText, Field(discriminator="type")]]


class GivenCallOutput(_Shape):
    id: str
    type: Literal["function_call_output"]
    call_id: str
    output: str
    status: Literal["completed"]


InputItem = Annotated[GivenMessage | OutputReasoning | OutputCall | GivenCallOutput, Field(discriminator="type")]


class InputItemList(_Shape):
    object: Literal["list"]
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseError(_Shape):
    code: Literal["server_error"]
    message: str


class IncompleteDetails(_Shape):
    reason: Literal["max_output_tokens"]


class GivenFormat(_Shape):
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    name: str = ""
    schema_: dict[str, Any] = Field({}, alias="schema")
    strict: bool = False
    description: str = ""
    regex: str = ""
    grammar: str = ""


class ResponseText(_Shape):
    format: GivenFormat
    verbosity: Literal["medium"]


class ResponseReasoning(_Shape):
    effort: Literal["none"] | None
    summary: None


class GivenTool(_Shape):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any]
    strict: bool


class NamedFunction(_Shape):
    type: Literal["function"]
    name: str


class InputTokensDetails(_Shape):
    cached_tokens: int


class OutputTokensDetails(_Shape):
    reasoning_tokens: int


class ResponseUsage(_Shape):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(_Shape):
    """OpenAI's response. `recovery` and `seed` are ours."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: JobStatus
    model: str
    output: list[OutputItem]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    usage: ResponseUsage | None
    recovery: Recovery | None
    seed: int = Field(description="The one given, or the one that was drawn.")
    background: bool
    store: bool
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    tool_choice: Literal["auto", "none", "required"] | NamedFunction
    tools: list[GivenTool]
    temperature: float
    top_p: float
    top_logprobs: int
    truncation: Literal["disabled"]
    text: ResponseText
    reasoning: ResponseReasoning
    service_tier: Literal["default"]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: Literal["in_memory", "24h"] | None
    conversation: None
    prompt: None


class DeletedResponse(_Shape):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseEvent(_Shape):
    """One event of a response's stream."""

    event: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    ]
    data: str = Field(description="JSON, with `type` and `sequence_number`")


RESPONSE_SHAPES: list[type[BaseModel]] = [ResponseObject, DeletedResponse, InputItemList, ResponseEvent]
