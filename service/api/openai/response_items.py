"""The items of a conversation: as clients send them, as they are stored with a response, and as they are shown.

Stored are messages ``{"id", "role", "content": [text, ...]}``, and by their ``type`` function_call ``{"id", "type", "call_id",
"name", "arguments"}``, function_call_output ``{"id", "type", "call_id", "output"}`` and reasoning ``{"id", "type", "content"}``.
Each response keeps its whole conversation, what came before included: so it needs none of its predecessors any more, whatever
becomes of them.
"""

from collections.abc import Sequence
from typing import Any

from service.api.openai.chat_requests import parsed_arguments
from service.api.openai.response_requests import InputCall, InputCallOutput, InputItem, InputMessage, InputReasoning
from storage.job_spec import JobSpec
from storage.records import JobRecord

PREFIX = "resp_"

Item = dict[str, Any]


def output_id(response_id: str, kind: str, number: int) -> str:
    """Of item ``number`` of its kind that the response makes. Fixed with the response's own id, like those of its input."""
    return f"{kind}_{response_id.removeprefix(PREFIX)}" + (f"_o{number}" if number else "")


def stored(response_id: str, items: Sequence[InputItem]) -> list[Item]:
    """What is new in a request, as items."""
    return [_stored(item, f"{response_id.removeprefix(PREFIX)}_{number}") for number, item in enumerate(items)]


def _stored(item: InputItem, name: str) -> Item:
    match item:
        case InputMessage():
            return {"id": f"msg_{name}", "role": item.role, "content": [part.text for part in item.content]}
        case InputCall():
            told = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
            return {"id": f"fc_{name}", "type": item.type, **told}
        case InputCallOutput():
            output = "".join(part.text for part in item.output)
            return {"id": f"fco_{name}", "type": item.type, "call_id": item.call_id, "output": output}
        case InputReasoning():
            return {"id": f"rs_{name}", "type": item.type, "content": [part.text for part in item.content]}


def conversation(record: JobRecord, output: Sequence[Item]) -> list[Item]:
    """A response's input and what it answered, if anything: what comes before the input of its successor."""
    answer = [item for item in map(_stored_output, output) if item.get("content") != [""]]
    return [*JobSpec.from_json(record.spec).request["items"], *answer]


def _stored_output(item: Item) -> Item:
    texts = {"content": [part["text"] for part in item["content"]]} if "content" in item else {}
    if item["type"] == "message":
        return {"id": item["id"], "role": item["role"], **texts}
    return {**{name: value for name, value in item.items() if name not in ("status", "summary")}, **texts}


def chat(instructions: str | None, items: Sequence[Item], developer: str) -> list[Item]:
    """As chat templates want it: what an answer consists of is one message. ``developer``: what the template calls that role."""
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    parts: set[str] = set()  #: of the last message, where that is an answer and may go on
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
            parts = set()
            continue
        if kind == "message" and item["role"] != "assistant":
            role = developer if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": "".join(item["content"])})
            parts = set()
            continue
        if not parts or parts & _BEFORE[kind]:
            messages.append({"role": "assistant", "content": ""})
            parts = set()
        _put(messages[-1], kind, item)
        parts.add(kind)
    return messages


#: With what an answer has already it cannot go on with such an item: another answer begins.
_BEFORE = {
    "reasoning": {"reasoning", "message", "function_call"},
    "message": {"message", "function_call"},
    "function_call": set[str](),
}


def _put(message: Item, kind: str, item: Item) -> None:
    if kind == "function_call":
        function = {"name": item["name"], "arguments": parsed_arguments(item["arguments"])}
        message.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    else:
        message["content" if kind == "message" else "reasoning_content"] = "".join(item["content"])


def shown(item: Item) -> Item:
    """As ``input_items`` lists it."""
    kind = item.get("type", "message")
    if kind == "function_call":
        return output_call(item["id"], item["call_id"], item["name"], item["arguments"], "completed")
    if kind == "function_call_output":
        return {**item, "status": "completed"}
    if kind == "reasoning":
        return output_reasoning(item["id"], "completed", [{"type": "reasoning_text", "text": text} for text in item["content"]])
    if item["role"] == "assistant":
        return output_message(item["id"], "completed", [output_text(text, []) for text in item["content"]])
    content = [{"type": "input_text", "text": text} for text in item["content"]]
    return {"id": item["id"], "type": "message", "role": item["role"], "status": "completed", "content": content}


def output_text(text: str, logprobs: list[Item]) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def output_message(item_id: str, status: str, content: list[Item]) -> Item:
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def output_reasoning(item_id: str, status: str, content: list[Item]) -> Item:
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}


def output_call(item_id: str, call_id: str, name: str, arguments: str, status: str) -> Item:
    told = {"call_id": call_id, "name": name, "arguments": arguments}
    return {"id": item_id, "type": "function_call", **told, "status": status}
