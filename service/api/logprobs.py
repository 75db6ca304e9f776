"""Log probabilities, stored as JSON ``{"token", "logprob", "top": [[token, logprob], ...]}``, in the shapes that clients get."""

import json
from collections.abc import Sequence
from typing import Any

from service.tokenization import Tokenization
from storage.records import LogEntry

_LEAST = -9999.0  #: what OpenAI shows for "practically impossible"; JSON knows no infinity


def native(entry: LogEntry) -> dict[str, Any] | None:
    """As stored, or None where the engine had none."""
    value: dict[str, Any] | None = json.loads(entry.logprobs) if entry.logprobs else None
    return value


def legacy(entries: Sequence[LogEntry], text_before: int, tokenization: Tokenization) -> dict[str, list[Any]]:
    """The shape of OpenAI's completions. ``text_before``: characters of the answer before the first entry.

    Each token is shown on its own. ``top_logprobs`` is a mapping by text, so of two tokens with equal text the likelier stays.
    """
    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in entries:
        value = native(entry)
        shown["tokens"].append(tokenization.token_text(entry.token))
        shown["token_logprobs"].append(value["logprob"] if value else None)
        top: dict[str, float] = {}
        for token, logprob in value["top"] if value else []:
            top.setdefault(tokenization.token_text(token), logprob)
        shown["top_logprobs"].append(top if value else None)
        shown["text_offset"].append(text_before)
        text_before += len(entry.text)
    return shown


def chat(entries: Sequence[LogEntry], tokenization: Tokenization) -> list[dict[str, Any]]:
    """The shape of OpenAI's chat completions. ``bytes`` tell what of a character a token holds; its text cannot."""

    def shown(token: int, logprob: float) -> dict[str, Any]:
        held = tokenization.token_bytes(token)
        return {"token": held.decode(errors="replace"), "logprob": max(logprob, _LEAST), "bytes": list(held)}

    values = [(entry, native(entry) or {"logprob": _LEAST, "top": []}) for entry in entries]
    return [
        {**shown(entry.token, value["logprob"]), "top_logprobs": [shown(*one) for one in value["top"]]} for entry, value in values
    ]
