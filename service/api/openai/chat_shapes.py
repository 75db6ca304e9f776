"""What ``/v1/chat/completions`` answers, as models: for the OpenAPI document, as in ``service.api.shapes``."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from service.api.shapes import PromptTokensDetails


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ChatFunctionCall(_Shape):
    name: str
    arguments: str = Field(description="JSON as the model wrote it: it may be none.")


class ChatToolCall(_Shape):
    id: str
    type: Literal["function"]
    function: ChatFunctionCall


class ChatAnswerMessage(_Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] | None = None


class ChatTopLogprob(_Shape):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(_Shape):
    content: list[ChatTokenLogprob] = Field(description="Of all the choice's tokens, reasoning and calls among them.")
    refusal: None


class ChatChoice(_Shape):
    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class CompletionTokensDetails(_Shape):
    reasoning_tokens: int


class ChatUsage(_Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ChatCompletion(_Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage
    service_tier: Literal["default"]
    system_fingerprint: str
    metadata: dict[str, str] | None = Field(None, description="Of stored ones.")


class ChatCompletionEvent(_Shape):
    """One event of a streamed chat completion."""

    event: Literal["message"] = "message"
    data: str = Field(description="JSON; at last [DONE]")


class ChatCompletionList(_Shape):
    object: Literal["list"]
    data: list[ChatCompletion]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredMessage(BaseModel):
    """As it was sent, content parts aside."""

    id: str
    role: str
    content: str | None
    content_parts: list[dict[str, str]] | None


class StoredMessageList(_Shape):
    object: Literal["list"]
    data: list[StoredMessage]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ChatCompletionDeleted(_Shape):
    id: str
    object: Literal["chat.completion.deleted"]
    deleted: Literal[True]


CHAT_SHAPES: list[type[BaseModel]] = [
    ChatCompletion, ChatCompletionEvent, ChatCompletionList, StoredMessageList, ChatCompletionDeleted,
]  # fmt: skip
