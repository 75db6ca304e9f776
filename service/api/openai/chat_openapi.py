"""The operations of ``/v1/chat/completions`` for the OpenAPI document."""

from service.api import examples
from service.api.openai.chat_requests import ChatRequest, ChatUpdate
from service.api.openai.chat_shapes import (
    ChatCompletion,
    ChatCompletionDeleted,
    ChatCompletionEvent,
    ChatCompletionList,
    StoredMessageList,
)
from service.api.openapi import EVENTS, IDEMPOTENCY_KEY, JSON, SUBMISSION, answer, body, operation, parameter, refusals
from service.api.problems import InvalidRequest, JobNotFound
from service.api.shapes import OpenAIError, reference
from storage.errors import StoreUnavailable

_READING = (InvalidRequest, JobNotFound, StoreUnavailable)
_PAGING = [
    parameter("query", "after", "The id of the last item of the page before.", {"type": "string"}),
    parameter("query", "limit", "Items in a page.", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
    parameter("query", "order", "By age.", {"type": "string", "enum": ["asc", "desc"], "default": "asc"}),
]

CREATE_CHAT_COMPLETION = operation(
    {
        200: {
            "description": "The completion; with `stream`, chunks and `[DONE]`",
            "content": {JSON: {"schema": reference(ChatCompletion)}, EVENTS: {"schema": reference(ChatCompletionEvent)}},
        },
        **refusals(OpenAIError, *SUBMISSION),
    },
    operationId="create_chat_completion",
    requestBody=body(ChatRequest, examples.CHAT),
    parameters=[IDEMPOTENCY_KEY],
)
LIST_CHAT_COMPLETIONS = operation(
    {200: answer("A page of stored completions", ChatCompletionList), **refusals(OpenAIError, InvalidRequest, StoreUnavailable)},
    operationId="list_chat_completions",
    parameters=[*_PAGING, parameter("query", "model", "Only of this model.", {"type": "string"})],
)
GET_CHAT_COMPLETION = operation(
    {200: answer("The completion", ChatCompletion), **refusals(OpenAIError, *_READING)}, operationId="get_chat_completion"
)
LIST_CHAT_MESSAGES = operation(
    {200: answer("Its messages", StoredMessageList), **refusals(OpenAIError, *_READING)},
    operationId="list_chat_messages",
    parameters=_PAGING,
)
UPDATE_CHAT_COMPLETION = operation(
    {200: answer("The completion with its new metadata", ChatCompletion), **refusals(OpenAIError, *_READING)},
    operationId="update_chat_completion",
    requestBody=body(ChatUpdate),
)
DELETE_CHAT_COMPLETION = operation(
    {200: answer("It is gone", ChatCompletionDeleted), **refusals(OpenAIError, *_READING)}, operationId="delete_chat_completion"
)
