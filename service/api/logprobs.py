"""Log probabilities, stored as JSON ``{"token", "logprob", "top": [[token, logprob], ...]}``, in the shapes that clients get."""

import json
from collections.abc import Sequence
from typing import Any

from service.tokenization import Tokenization
from storage.records import LogEntry


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
