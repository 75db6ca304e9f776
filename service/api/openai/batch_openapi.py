"""Files and batches for the OpenAPI document (see ``service.api.openapi``)."""

from service.api import examples
from service.api.openai.batch_requests import BatchRequest
from service.api.openai.batch_shapes import Batch, BatchList, DeletedFile, File, FileList
from service.api.openapi import IDEMPOTENCY_KEY, SUBMISSION, answer, body, operation, parameter, refusals
from service.api.problems import (
    BatchNotFound,
    BodyTooLarge,
    FileNotFound,
    FileStoreFull,
    IdempotencyConflict,
    InvalidRequest,
    ModelNotFound,
    TooManyBatches,
)
from service.api.shapes import OpenAIError
from storage.errors import StoreUnavailable

MAX_LIMIT = 1000
_FILE_FORM = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary", "description": "JSON lines."},
                    "purpose": {"type": "string", "const": "batch"},
                },
                "additionalProperties": False,
            }
        }
    },
}
_PAGE = [
    parameter("query", "limit", "Objects in a page.", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": 20}),
    parameter("query", "after", "`last_id` of the page before.", {"type": "string"}),
]
_UPLOADS = (InvalidRequest, BodyTooLarge, IdempotencyConflict, FileStoreFull, StoreUnavailable)

CREATE_FILE = operation(
    {200: answer("The file is durable", File), **refusals(OpenAIError, *_UPLOADS)},
    operationId="create_file",
    requestBody=_FILE_FORM,
    parameters=[IDEMPOTENCY_KEY],
)
LIST_FILES = operation(
    {200: answer("Uploaded files, newest first", FileList), **refusals(OpenAIError, InvalidRequest, StoreUnavailable)},
    operationId="list_files",
    parameters=[*_PAGE, parameter("query", "purpose", "Only these.", {"const": "batch"})],
)
GET_FILE = operation(
    {200: answer("The file", File), **refusals(OpenAIError, FileNotFound, StoreUnavailable)}, operationId="get_file"
)
DELETE_FILE = operation(
    {200: answer("It is gone", DeletedFile), **refusals(OpenAIError, FileNotFound, StoreUnavailable)}, operationId="delete_file"
)
_CONTENT = {"description": "Its bytes", "content": {"application/jsonl": {"schema": {"type": "string"}}}}
GET_CONTENT = operation({200: _CONTENT, **refusals(OpenAIError, FileNotFound, StoreUnavailable)}, operationId="get_file_content")
CREATE_BATCH = operation(
    {
        200: answer("The batch is durable", Batch),
        **refusals(OpenAIError, *(each for each in SUBMISSION if each is not ModelNotFound), FileNotFound, TooManyBatches),
    },
    operationId="create_batch",
    requestBody=body(BatchRequest, examples.BATCH),
    parameters=[IDEMPOTENCY_KEY],
)
LIST_BATCHES = operation(
    {200: answer("Batches, newest first", BatchList), **refusals(OpenAIError, InvalidRequest, StoreUnavailable)},
    operationId="list_batches",
    parameters=_PAGE,
)
GET_BATCH = operation(
    {200: answer("The batch", Batch), **refusals(OpenAIError, BatchNotFound, StoreUnavailable)}, operationId="get_batch"
)
CANCEL_BATCH = operation(
    {200: answer("The batch", Batch), **refusals(OpenAIError, InvalidRequest, BatchNotFound, StoreUnavailable)},
    operationId="cancel_batch",
)
