"""Calls of OpenAI's SDK that take a while, as a client makes them who comes back until he has his answer.

Each is a function of (client, ``seen``), tells ``seen`` how many tokens it was shown, and returns all that it was told, but for
what differs between any two runs. What breaks on the way is no failure of a call; what it is then told again must be the same.
"""

import functools
import json
import runpy
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import openai
from pydantic import BaseModel, Field

from chaos.place import ROOT

Seen = Callable[[int], None]
Pieces = list[dict[str, Any]]

TOKENS = 240
PROMPT = "Once upon a time there was a server that died in the middle of"
CHAT = [{"role": "user", "content": PROMPT}]
SEED = {"seed": 11}
LOGPROBS = "message.output_text.logprobs"
#: Digits are tokens of their own: each answer is about as long as the others.
_NUMBER = {"type": "string", "pattern": "^[0-9]{210}$"}
_ARGUMENTS = {"type": "object", "properties": {"number": _NUMBER}, "required": ["number"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "dial", "parameters": _ARGUMENTS}}

#: The loop that docs/responses.md and docs/examples give to clients.
resumed = runpy.run_path(str(ROOT / "docs" / "examples" / "resume.py"))["events"]


class Code(BaseModel):
    digits: str = Field(pattern="^[0-9]{220}$")


_OF_ONE_RUN = {"id", "item_id", "created", "created_at", "completed_at", "request_id", "recovery", "cached_tokens"}


def essence(value: Any) -> Any:
    """Without ids, times, and what was found in a cache or recovered."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", warnings=False)
    if isinstance(value, dict):
        return {name: essence(inner) for name, inner in value.items() if name not in _OF_ONE_RUN}
    return [essence(inner) for inner in value] if isinstance(value, list) else value


def key() -> dict[str, str]:
    return {"Idempotency-Key": uuid.uuid4().hex}


def told(tell: Callable[[Pieces], AbstractContextManager[Any]], seen: Seen, num_choices: int = 1) -> Pieces:
    """The last telling of a stream; those before it broke, and are its beginning, choice by choice.

    ``tell`` is given what was told before it broke.
    """
    broken: list[Pieces] = [[]]
    while True:
        pieces: Pieces = []
        try:
            with tell(broken[-1]) as stream:
                for piece in stream:
                    pieces.append(piece.model_dump(mode="json", warnings=False))
                    seen(len(pieces) // num_choices)
        except (openai.APIConnectionError, openai.InternalServerError):
            broken.append(pieces)
            time.sleep(0.2)
            continue
        for telling in broken:
            for index in range(num_choices):
                beginning = of_choice(telling, index)
                assert beginning == of_choice(pieces, index)[: len(beginning)]
        return pieces


def of_choice(pieces: Pieces, index: int) -> Pieces:
    """In which order choices are told is chance. What belongs to none goes to each."""
    return [piece for piece in pieces if not piece.get("choices") or piece["choices"][0]["index"] == index]


# --- Responses --------------------------------------------------------------------------------------------------------


def streamed_response(client: openai.OpenAI, seen: Seen, *, background: bool = False) -> Any:
    events = []
    shown = {"include": [LOGPROBS], "top_logprobs": 2}
    for event in resumed(client, input=PROMPT, background=background, max_output_tokens=TOKENS, extra_body=SEED, **shown):
        events.append(event)
        seen(len(events))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    assert client.responses.retrieve(final.id, include=[LOGPROBS]) == final
    assert list(client.responses.retrieve(final.id, include=[LOGPROBS], stream=True)) == events
    return essence(events)


def background_response(client: openai.OpenAI, seen: Seen) -> Any:
    return streamed_response(client, seen, background=True)


def polled_response(client: openai.OpenAI, seen: Seen) -> Any:
    form = {"type": "json_schema", "name": "code", "schema": Code.model_json_schema()}
    response = client.responses.create(input=PROMPT, background=True, text={"format": form}, extra_body=SEED, extra_headers=key())
    while response.status in ("queued", "in_progress"):
        seen(len(response.output_text))
        time.sleep(0.1)
        response = client.responses.retrieve(response.id)
    Code.model_validate_json(response.output_text)
    return essence(response)


def helped_response(client: openai.OpenAI, seen: Seen) -> Any:
    """The SDK's own helper: where the api died it reads the whole again, by the id."""
    asked = {"input": PROMPT, "model": model(client), "background": True, "extra_body": SEED, "extra_headers": key()}

    def tell(known: Pieces) -> AbstractContextManager[Any]:
        request = {"response_id": known[0]["response"]["id"]} if known else asked
        return client.responses.stream(text_format=Code, **request)

    return essence(told(tell, seen))


# --- Chat Completions and Completions ---------------------------------------------------------------------------------


def streamed_chat(client: openai.OpenAI, seen: Seen) -> Any:
    """Two choices, with log probabilities; stored, it is found again as it was told."""
    asked = {"model": model(client), "messages": CHAT, "n": 2, "max_completion_tokens": TOKENS, "logprobs": True, "top_logprobs": 2}
    headers, more = key(), {"store": True, "stream_options": {"include_usage": True}, **SEED}
    create = client.chat.completions.create
    pieces = told(lambda _: create(stream=True, extra_headers=headers, **asked, **more), seen, 2)
    stored = client.chat.completions.retrieve(pieces[0]["id"])
    choices = [of_choice(pieces, index) for index in range(2)]
    assert [choice.message.content for choice in stored.choices] == [
        "".join(piece["choices"][0]["delta"].get("content") or "" for piece in choice if piece["choices"]) for choice in choices
    ]
    assert stored.usage.completion_tokens == 2 * TOKENS == pieces[-1]["usage"]["completion_tokens"]
    return essence(choices), essence(stored)


def streamed_call(client: openai.OpenAI, seen: Seen) -> Any:
    """A tool's call, cut in the middle of its arguments."""
    forced = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}  # the tiny model calls none by itself
    asked = {"model": model(client), "messages": CHAT, "logprobs": True, **forced, **SEED}
    headers, create = key(), client.chat.completions.create
    pieces = told(lambda _: create(stream=True, extra_headers=headers, **asked), seen)
    calls = [call for piece in pieces for call in piece["choices"][0]["delta"].get("tool_calls") or ()]
    assert calls[0]["function"]["name"] == "dial"
    assert len(json.loads("".join(call["function"]["arguments"] for call in calls))["number"]) == 210
    assert pieces[-1]["choices"][0]["finish_reason"] == "tool_calls"
    return essence(pieces)


def helped_chat(client: openai.OpenAI, seen: Seen) -> Any:
    """The SDK's own helper, with an object of a pydantic model."""
    asked = {"model": model(client), "messages": CHAT, "response_format": Code, "extra_headers": key(), **SEED}
    pieces = told(lambda _: client.chat.completions.stream(**asked), lambda count: seen(count // 2))  # a chunk and its content
    (done,) = (piece for piece in pieces if piece["type"] == "content.done")
    Code.model_validate_json(done["content"])
    return essence(pieces)


def whole_chat(client: openai.OpenAI, seen: Seen) -> Any:
    """The SDK sends it again by itself."""
    seen(TOKENS)  # nothing is shown before the end
    asked = {"model": model(client), "messages": CHAT, "response_format": Code, "extra_headers": key(), **SEED}
    return essence(client.with_options(max_retries=30).chat.completions.parse(**asked))


def streamed_completion(client: openai.OpenAI, seen: Seen) -> Any:
    asked = {"model": model(client), "prompt": PROMPT, "n": 2, "max_tokens": TOKENS, "logprobs": 2, **SEED}
    headers = key()
    pieces = told(lambda _: client.completions.create(stream=True, extra_headers=headers, **asked), seen, 2)
    return essence([of_choice(pieces, index) for index in range(2)])


# --- Files and Batches ------------------------------------------------------------------------------------------------

BODIES = {
    "/v1/responses": {"input": PROMPT, "max_output_tokens": TOKENS},
    "/v1/chat/completions": {"messages": CHAT, "max_completion_tokens": TOKENS},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": TOKENS},
}


def batch(client: openai.OpenAI, seen: Seen, endpoint: str) -> Any:
    body = {"model": model(client), **BODIES[endpoint]}
    lines = [{"custom_id": f"{i}", "method": "POST", "url": endpoint, "body": {**body, "seed": i}} for i in range(2)]
    content, patient = "\n".join(map(json.dumps, lines)).encode(), client.with_options(max_retries=30)
    file = patient.files.create(file=("in.jsonl", content), purpose="batch", extra_headers=key())
    made = patient.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", extra_headers=key())
    while made.status not in ("completed", "failed", "expired", "cancelled"):
        seen(_tokens_of(patient, made.id))
        time.sleep(0.2)
        made = patient.batches.retrieve(made.id)
    assert (made.status, made.request_counts.completed, made.request_counts.failed) == ("completed", 2, 0)
    return essence([json.loads(line) for line in patient.files.content(made.output_file_id).text.splitlines()])


def _tokens_of(client: openai.OpenAI, batch_id: str) -> int:
    """Of the line that has fewest. The native list tells: OpenAI's API shows nothing of a line before its end."""
    jobs: Any = client.get("/jobs", cast_to=object, options={"params": {"limit": 100}})
    lines = [job["usage"]["completion_tokens"] for job in jobs["data"] if batch_id.removeprefix("batch_") in job["id"]]
    return min(lines) if len(lines) == 2 else 0


def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


CALLS: dict[str, Callable[[openai.OpenAI, Seen], Any]] = {
    "streamed response": streamed_response,
    "background response": background_response,
    "polled response": polled_response,
    "response by the helper": helped_response,
    "streamed chat": streamed_chat,
    "streamed call of a tool": streamed_call,
    "chat by the helper": helped_chat,
    "whole chat": whole_chat,
    "streamed completion": streamed_completion,
    **{f"batch of {endpoint}": functools.partial(batch, endpoint=endpoint) for endpoint in BODIES},
}
