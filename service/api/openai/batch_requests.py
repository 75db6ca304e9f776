"""What clients may send of batches: the body of ``POST /v1/batches``, and a line of an input file."""

from typing import Any, Literal

from pydantic import Field

from service.api.request_model import RequestModel
from service.api.schemas import Metadata


class BatchRequest(RequestModel):
    """The body of ``POST /v1/batches``."""

    input_file_id: str = Field(min_length=1, max_length=80, description="A file of purpose `batch`.")
    endpoint: str = Field(max_length=80, description="What each line is a request to, as `/v1/completions`.")
    completion_window: Literal["24h"]
    metadata: Metadata | None = Field(None, max_length=16)


class BatchLine(RequestModel):
    """A line of an input file. ``body`` is for the endpoint to judge."""

    custom_id: str = Field(min_length=1, max_length=512)
    method: Literal["POST"]
    url: str
    body: dict[str, Any]
