"""What the served model's chat template can do, seen once: tools and the way it writes calls, reasoning, names of roles."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.api import submission
from service.api.context import Context
from service.api.openai.dialects import THINK, Dialect, dialect_of, reasons
from service.api.openai.parts import Expected
from service.api.openai.tools import ToolUse
from service.api.problems import InvalidRequest
from service.tokenization import ChatTemplateError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    expected: Expected  #: what the answer may hold


class ChatTemplate:
    def __init__(self, context: Context) -> None:
        self._context = context

    @functools.cached_property
    def _dialect(self) -> Dialect | None:
        tokenization = self._context.model.tokenization
        return dialect_of(tokenization.template_source, tokenization.template_variables)

    @functools.cached_property
    def developer(self) -> str:
        """What the template calls that role: most know no developer, who says what the system says."""
        return "developer" if "developer" in self._context.model.tokenization.template_source else "system"

    async def prompt(self, messages: Sequence[Message], use: ToolUse, switches: Mapping[str, bool], field: str) -> Prompt:
        """``field``: that the messages came in. Raises InvalidRequest that names what the template has no place for."""
        tokenization, tools = self._context.model.tokenization, [function.for_template() for function in use.functions]
        if tools and self._dialect is None:
            raise InvalidRequest("tools: the model's chat template has no tools, or none that are known here", param="tools")
        submission.check_length(_num_chars(messages) + _num_chars(tools), self._context, field)
        for name in switches:
            if name not in tokenization.template_variables:
                place = f"chat_template_kwargs.{name}"
                raise InvalidRequest(f"{place}: the model's chat template has no such switch", param=place)

        def encoded() -> tuple[list[int], str]:
            chat = tokenization.render_chat(messages, tools=tools or None, **switches)
            return tokenization.encode_rendered(chat), chat

        try:
            tokens, chat = await self._context.in_tokenizer_thread(encoded)
        except ChatTemplateError as error:
            raise InvalidRequest(f"{field}: {error}", param=field) from None
        reasoning = reasons(tokenization.template_source)
        expected = Expected(
            dialect=self._dialect if tools else None,
            tools=use.names,
            max_calls=None if use.parallel else 1,
            reasons=reasoning,
            thinking=reasoning and chat.rstrip().endswith(THINK),
        )
        return Prompt(tuple(tokens), expected)


def _num_chars(value: Any) -> int:
    """Of all strings in it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(name) + _num_chars(content) for name, content in value.items())
    return sum(map(_num_chars, value)) if isinstance(value, list) else 1
