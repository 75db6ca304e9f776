"""Bodies that the OpenAPI document shows, by endpoint and by what they are for. A test sends each of them."""

from typing import Any

Examples = dict[str, dict[str, Any]]

_CHAT: list[dict[str, str]] = [{"role": "user", "content": "Tell me of the lighthouse keeper."}]
_PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

JOB: Examples = {
    "a story": {"prompt": "The lighthouse keeper", "max_tokens": 400, "seed": 7},
    "a chat that must be done in ten minutes": {"messages": _CHAT, "max_tokens": 200, "deadline_seconds": 600, "priority": 10},
    "an object": {
        "prompt": "A person:",
        "max_tokens": 100,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON}},
    },
}
COMPLETION: Examples = {
    "three endings": {"model": "demo", "prompt": "The lighthouse keeper", "max_tokens": 60, "n": 3, "temperature": 0.8},
    "a stream": {"model": "demo", "prompt": "The sea", "max_tokens": 60, "stream": True, "stream_options": {"include_usage": True}},
}
CHAT: Examples = {
    "a chat": {"model": "demo", "messages": _CHAT, "max_completion_tokens": 200},
    "an object": {
        "model": "demo",
        "messages": _CHAT,
        "max_completion_tokens": 100,
        "response_format": {"type": "json_schema", "json_schema": {"name": "keeper", "schema": _PERSON, "strict": True}},
    },
    "stored, to be fetched again": {"model": "demo", "messages": _CHAT, "max_completion_tokens": 200, "store": True},
}
RESPONSE: Examples = {
    "in the background": {"model": "demo", "input": "Write a story about a lighthouse keeper.", "background": True},
    "a stream": {"model": "demo", "input": "Tell me of the sea.", "instructions": "Be brief.", "stream": True},
    "an object": {
        "model": "demo",
        "input": "Describe a lighthouse keeper as JSON.",
        "max_output_tokens": 100,
        "text": {"format": {"type": "json_schema", "name": "keeper", "schema": _PERSON, "strict": True}},
    },
}
BATCH: Examples = {
    "a file of chats": {"input_file_id": "file-0", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
}
