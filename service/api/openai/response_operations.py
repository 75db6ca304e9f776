"""``/v1/responses`` in the OpenAPI document."""

from typing import Any

from service.api import examples
from service.api.openai.response_requests import INCLUDABLE, ResponseRequest
from service.api.openai.response_shapes import DeletedResponse, InputItemList, ResponseEvent, ResponseObject
from service.api.openapi import (
    EVENTS,
    IDEMPOTENCY_KEY,
    JSON,
    SUBMISSION,
    answer,
    body,
    operation,
    parameter,
    refusals,
)
from service.api.problems import InvalidRequest, JobNotFound
from service.api.shapes import OpenAIError, reference
from storage.errors import StoreUnavailable

_OF_ONE = refusals(OpenAIError, InvalidRequest, JobNotFound, StoreUnavailable)
_INCLUDE = parameter(
    "query",
    "include[]",
    "What was asked for at its creation is always shown.",
    {"type": "array", "items": {"type": "string", "enum": list(INCLUDABLE)}},
)


def _whole_or_stream(description: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {JSON: {"schema": reference(ResponseObject)}, EVENTS: {"schema": reference(ResponseEvent)}},
    }


def _led_to(operation_id: str, description: str) -> dict[str, Any]:
    return {"operationId": operation_id, "parameters": {"response_id": "$response.body#/id"}, "description": description}


_LINKS = {
    "response": _led_to("get_response", "The response."),
    "input": _led_to("list_input_items", "What it answers."),
    "cancel": _led_to("cancel_response", "Its end."),
    "delete": _led_to("delete_response", "The end of all that is kept of it."),
}

CREATE_RESPONSE = operation(
    {
        200: {**_whole_or_stream("The response: at once in the background, else at its end; or its events"), "links": _LINKS},
        **refusals(OpenAIError, *SUBMISSION),
    },
    operationId="create_response",
    requestBody=body(ResponseRequest, examples.RESPONSE),
    parameters=[IDEMPOTENCY_KEY],
)
GET_RESPONSE = operation(
    {200: _whole_or_stream("The response as it is now, or its events"), **_OF_ONE},
    operationId="get_response",
    parameters=[
        parameter("query", "stream", "Its events instead.", {"type": "boolean", "default": False}),
        parameter(
            "query",
            "starting_after",
            "`sequence_number` of the last event seen; with stream=true.",
            {"type": "string", "pattern": "^[0-9]{1,15}$"},
        ),
        parameter("query", "include_obfuscation", "No padding is sent.", {"type": "boolean", "default": False}),
        _INCLUDE,
    ],
)
CANCEL_RESPONSE = operation({200: answer("The response as it ended", ResponseObject), **_OF_ONE}, operationId="cancel_response")
DELETE_RESPONSE = operation(
    {200: answer("It is gone", DeletedResponse), **refusals(OpenAIError, JobNotFound, StoreUnavailable)},
    operationId="delete_response",
)
LIST_INPUT_ITEMS = operation(
    {200: answer("A page of items", InputItemList), **_OF_ONE},
    operationId="list_input_items",
    parameters=[
        parameter("query", "limit", "Items in a page.", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
        parameter("query", "order", "Oldest or newest first.", {"type": "string", "enum": ["asc", "desc"], "default": "desc"}),
        parameter("query", "after", "`last_id` of the page before.", {"type": "string"}),
        _INCLUDE,
    ],
)
