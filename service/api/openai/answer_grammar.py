"""``JobSpec.grammar`` of an answer that may reason, call tools and have a form: each part is written as its model writes it.

A word of the model's that is a token of its own is asked for as that token: llguidance takes such a token for no text, even where
it shows some. All else is text. What ``parts.Parser`` would read as a call is one that the grammar allows, however it is spelled.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.errors import GrammarFailed
from engine.grammar import Grammars
from service.api import submission
from service.api.context import Context
from service.api.formats import MAX_LENGTH, Json, ResponseFormat, TextFormat, check_schema, form_of, to_json
from service.api.openai.dialects import THINK, THOUGHT, Dialect
from service.api.openai.parts import Expected
from service.api.openai.tools import Function, ToolUse
from service.api.problems import InvalidRequest

_ANY = r"(?s:.*)"
#: As Python's ``json`` writes it, and with it every template.
_SPACED = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_JSON_FORMATS = ("json_object", "json_schema")


async def answer_grammar(
    context: Context, wanted: ResponseFormat | TextFormat | None, field: str, expected: Expected, use: ToolUse
) -> str:
    """Empty where anything may be said. ``field``: that ``wanted`` came in. Raises InvalidRequest that names the place."""
    form = wanted if wanted is not None and wanted.type != "text" and not use.required else None
    if form is not None and use.functions:
        _check_form_beside_calls(form, field, expected)
    bound = use.required or (use.functions if use.strict or form is not None else ())
    if not bound and not expected.reasons:
        return await submission.grammar(context, form, field)
    if not bound and form is None:
        return ""
    tokenization = context.model.tokenization

    def made() -> str:
        _check_parameters(bound, use)
        inner = form_of(form, tokenization.grammars, field) if form is not None else None
        answer = _Answer(expected, bound, tokenization.added_token, inner, forced=bool(use.required), parallel=use.parallel)
        return _compiled(answer.grammar(), bound, use, tokenization.grammars)

    return await context.in_tokenizer_thread(made)


def _check_form_beside_calls(form: ResponseFormat | TextFormat, field: str, expected: Expected) -> None:
    assert expected.dialect is not None
    if not expected.dialect.opener:
        raise InvalidRequest(
            f"{field}: this model's calls are JSON and nothing else, which no other JSON can be told from: leave it out, or tools",
            param=field,
        )
    if form.type not in _JSON_FORMATS:
        raise InvalidRequest(f"{field}.type: beside tools only {' and '.join(_JSON_FORMATS)} are possible", param=f"{field}.type")


def _check_parameters(bound: tuple[Function, ...], use: ToolUse) -> None:
    for function in bound:
        place = _parameters_place(function, use)
        check_schema(function.parameters, place)
        if function.parameters.get("type", "object") != "object":
            raise InvalidRequest(f'{place}.type: arguments are an object: "object", or left out', param=f"{place}.type")
    length = sum(len(to_json(function.parameters)) for function in bound)
    if length > MAX_LENGTH:
        raise InvalidRequest(
            f"tools: {length} characters of schemas are more than the {MAX_LENGTH} that are taken where calls are bound to them",
            param="tools",
        )


def _parameters_place(function: Function, use: ToolUse) -> str:
    return f"{use.place.format(use.functions.index(function))}.parameters"


def _compiled(grammar: str, bound: tuple[Function, ...], use: ToolUse, grammars: Grammars) -> str:
    try:
        grammars.begin(grammar)
    except (GrammarFailed, ValueError) as error:  # ValueError: a number that fits into no float
        for function in bound:
            try:
                grammars.begin(to_json({"grammars": [_arguments(function)]}))
            except (GrammarFailed, ValueError) as cause:
                place = _parameters_place(function, use)
                raise InvalidRequest(f"{place}: {cause}", param=place) from None
        raise InvalidRequest(f"tools: their schemas together are too much: {error}", param="tools") from None
    return grammar


def _arguments(function: Function) -> Json:
    return {"json_schema": {"type": "object", **function.parameters, **_SPACED}}


@dataclass(frozen=True, slots=True)
class _Answer:
    """The rules of one answer, in llguidance's Lark."""

    expected: Expected
    bound: tuple[Function, ...]  #: the calls that may come
    token_of: Callable[[str], int | None]
    form: Json | None  #: a grammar of llguidance; None: anything may be said, or calls are forced
    forced: bool  #: calls must come
    parallel: bool

    def grammar(self) -> str:
        lark = "\n".join((*self._start(), *self._calls()))
        parts = {"form": self.form} if self.form is not None else {}
        parts |= {f"arguments_{i}": _arguments(function) for i, function in enumerate(self.bound)}
        return to_json({"grammars": [{"lark_grammar": lark}, *({**part, "name": name} for name, part in parts.items())]})

    def _start(self) -> Iterator[str]:
        if self.expected.thinking:
            yield "start: thought GAP answer"
        elif self.expected.reasons:
            yield f"start: ({self._written(THINK)} thought GAP)? answer"
        else:
            yield "start: answer"
        if self.expected.reasons:
            yield r"GAP: /\n{0,2}/"
            yield from self._text_up_to("thought", THOUGHT, ("THOUGHT", _without(THOUGHT)))
        if self.forced:
            yield "answer: calls"
        elif self.form is not None:
            yield "answer: @form | calls" if self.bound else "answer: @form"
        else:
            yield from self._text_or_calls()

    def _text_or_calls(self) -> Iterator[str]:
        dialect = self._dialect
        if dialect.opener:
            yield "answer: TEXT | opened run"
            yield from self._text_up_to("opened", dialect.opener, ("TEXT", f"{_without(dialect.opener)}{self._no_thought}"))
            if self.token_of(dialect.opener) is None:
                yield f"TEXT: {_without(dialect.opener)}{self._no_thought}"
        else:
            marks = "|".join(_quoted(mark) for mark in dialect.others)
            yield "answer: TEXT | calls"
            yield rf"TEXT: /\s*[^\{{\s]{_ANY}/ & ~/\s*({marks}){_ANY}/{self._no_thought}"

    @property
    def _no_thought(self) -> str:
        """A text that begins with reasoning is read as such, so it may not count as text."""
        return rf" & ~/\s*{_quoted(THINK)}{_ANY}/" if self.expected.reasons and not self.expected.thinking else ""

    def _text_up_to(self, rule: str, word: str, text: tuple[str, str]) -> Iterator[str]:
        """``rule``: any text and then ``word``. ``text``: name and form of a text that does not hold it."""
        if self.token_of(word) is None:
            yield f"{rule}[lazy]: /{_ANY}{_quoted(word)}/"
        else:
            yield f"{rule}: {text[0]} {self._written(word)}"
            yield f"{text[0]}: {text[1]}"

    def _calls(self) -> Iterator[str]:
        if not self.bound:
            return
        dialect = self._dialect
        spelling = dialect.spelling
        more = f" ({self._written(spelling.between)} call)*" if self.parallel else ""
        yield f"calls: {self._written(dialect.opener)} run"
        yield f"run: {self._written(spelling.begin.removeprefix(dialect.opener))} call{more} {self._written(spelling.end)}"
        before, behind = spelling.head
        for i, function in enumerate(self.bound):
            head = self._written(f"{before}{function.name}{behind}")
            yield f"{'call:' if i == 0 else '    |'} {head} @arguments_{i} {self._written(spelling.tail)}"

    @property
    def _dialect(self) -> Dialect:
        assert self.expected.dialect is not None
        return self.expected.dialect

    def _written(self, text: str) -> str:
        """Words that are tokens as those, the rest as text."""
        dialect = self.expected.dialect
        words = (*(dialect.words if dialect is not None else ()), THINK, THOUGHT)
        pieces = re.split(f"({'|'.join(map(re.escape, words))})", text)
        return " ".join(self._piece(piece, words) for piece in pieces if piece)

    def _piece(self, piece: str, words: tuple[str, ...]) -> str:
        token = self.token_of(piece) if piece in words else None
        return f"<[{token}]>" if token is not None else json.dumps(piece)


def _without(word: str) -> str:
    """A text that does not hold ``word``."""
    return f"/{_ANY}/ & ~/{_ANY}{_quoted(word)}{_ANY}/"


def _quoted(text: str) -> str:
    """For an expression between slashes."""
    return re.escape(text).replace("/", r"\/")
