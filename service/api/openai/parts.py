"""From an assistant's text to its parts: reasoning, content, tool calls. As it comes, and the same however it is cut into pieces.

Nothing here is remembered beyond the text: a stream that goes on after a crash, or in another process, parses the log again.
White space between parts belongs to none of them. What begins like a call and is none is content, to the letter.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from service.api.openai.dialects import THINK, THOUGHT, Dialect


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call begins; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of a call's arguments, as the model wrote it: it may be cut off, or be no JSON."""

    index: int
    text: str


Delta = Content | Reasoning | Call | Arguments


@dataclass(frozen=True, slots=True)
class Parts:
    """A whole answer. ``calls``: name and arguments."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]


def joined(deltas: Sequence[Delta]) -> Parts:
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        if isinstance(delta, Arguments):
            arguments.setdefault(delta.index, []).append(delta.text)
    return Parts(
        "".join(delta.text for delta in deltas if isinstance(delta, Reasoning)),
        "".join(delta.text for delta in deltas if isinstance(delta, Content)),
        tuple((delta.name, "".join(arguments.get(delta.index, ()))) for delta in deltas if isinstance(delta, Call)),
    )


@dataclass(frozen=True, slots=True)
class Expected:
    """What an answer may hold, by its request and the model's template. ``tools``: the names that may be called."""

    dialect: Dialect | None = None
    tools: frozenset[str] = frozenset()
    max_calls: int | None = None
    reasons: bool = False
    thinking: bool = False  #: the prompt has opened the reasoning


class _Mode(Enum):
    BEGIN = auto()  #: nothing was said yet, or nothing since the reasoning
    REASONING = auto()
    CONTENT = auto()
    HEAD = auto()  #: between an opener and a call's arguments: it may still turn out to be none
    ARGUMENTS = auto()
    TAIL = auto()  #: from a call's arguments to the end of its object
    AFTER = auto()  #: behind a call


class Parser:
    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._dialect = expected.dialect
        self._mode = _Mode.REASONING if expected.thinking else _Mode.BEGIN
        self._may_think = expected.reasons and not expected.thinking
        self._skip_space = expected.thinking  #: what comes first in a part that follows a word of the dialect
        self._buffer = ""  #: not yet decided
        self._opening = ""  #: what led to HEAD, in case that it was content
        self._scan, self._scanned = _ObjectScan(), 0  #: the second: characters of a head
        self._deltas: list[Delta] = []
        self._calls = 0

    @property
    def reasoning(self) -> bool:
        """What comes next is reasoning, as far as is known."""
        return self._mode is _Mode.REASONING

    def push(self, text: str) -> list[Delta]:
        self._buffer += text
        return self._work(final=False)

    def finish(self) -> list[Delta]:
        """What was held back: the text is over."""
        return self._work(final=True)

    def _work(self, final: bool) -> list[Delta]:
        steps = {
            _Mode.BEGIN: self._begin, _Mode.REASONING: self._reasoning, _Mode.CONTENT: self._content, _Mode.HEAD: self._head,
            _Mode.ARGUMENTS: self._arguments, _Mode.TAIL: self._tail, _Mode.AFTER: self._after,
        }  # fmt: skip
        while steps[self._mode](final):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    # Each step takes from the buffer what it can decide; True: there is more to do, in whatever mode it is now.

    def _begin(self, final: bool) -> bool:
        text = self._buffer.lstrip()
        marks = [THINK] if self._may_think else []
        if self._dialect is not None and not self._dialect.opener:
            marks += [*self._dialect.others, "{"]
        if not final and any(mark.startswith(text) for mark in marks):
            return bool(text) and self._open(text, marks)
        if self._open(text, marks):
            return True
        self._mode = _Mode.CONTENT
        return True

    def _open(self, text: str, marks: Sequence[str]) -> bool:
        mark = next((mark for mark in marks if text.startswith(mark)), None)
        if mark == THINK:
            self._mode, self._may_think, self._skip_space = _Mode.REASONING, False, True
            self._buffer = text[len(mark) :]
        elif mark is not None:
            rest = text if mark == "{" else text[len(mark) :]
            opening = text if self._skip_space else self._buffer
            self._begin_head(opening.removesuffix(rest), rest)
        return mark is not None

    def _reasoning(self, final: bool) -> bool:
        at = self._text_up_to(THOUGHT, Reasoning, final)
        if at is None:
            return False
        self._buffer = self._buffer[at + len(THOUGHT) :]
        self._mode, self._skip_space = _Mode.BEGIN, True
        return True

    def _content(self, final: bool) -> bool:
        opener = self._dialect.opener if self._dialect is not None else ""
        at = self._text_up_to(opener, Content, final)
        if at is None:
            return False
        at += len(opener)
        self._begin_head(self._buffer[:at], self._buffer[at:])
        return True

    def _text_up_to(self, mark: str, kind: type[Content] | type[Reasoning], final: bool) -> int | None:
        """Gives out the text before ``mark``, without the space between; where in the buffer the mark is. None: not there yet."""
        if self._skip_space:
            self._buffer = self._buffer.lstrip()
            self._skip_space = not self._buffer
        at = self._buffer.find(mark) if mark else -1
        end = at if at >= 0 else len(self._buffer)
        if mark and at < 0 and not final:
            end -= _overlap(self._buffer, mark)
        if mark and (at >= 0 or not final):
            end = len(self._buffer[:end].rstrip())
        if end:
            self._deltas.append(kind(self._buffer[:end]))
        self._buffer = self._buffer[end:]
        return at - end if at >= 0 else None

    def _begin_head(self, opening: str, rest: str) -> None:
        self._opening, self._buffer = opening, rest
        self._mode, self._scan, self._scanned = _Mode.HEAD, _ObjectScan(), 0

    def _head(self, final: bool) -> bool:
        dialect = self._dialect
        assert dialect is not None
        text = self._buffer.lstrip(dialect.lead + " \t\r\n") if self._opening.endswith(dialect.opener) else self._buffer.lstrip()
        found = dialect.head.match(text)
        if found is not None and found.end() <= dialect.longest_head:
            return self._begin_call(found["name"], text[found.end() :])
        end = self._end_of_object(text) if dialect.enclosed and text.startswith("{") else None
        if end is not None and end <= dialect.longest_head:
            return self._whole_call(text[:end], text[end:])
        hopeless = dialect.enclosed and text and not text.startswith("{")
        if final or hopeless or len(text) > dialect.longest_head:
            return self._no_call()
        return False

    def _end_of_object(self, text: str) -> int | None:
        end = self._scan.end_in(text[self._scanned :])
        before, self._scanned = self._scanned, len(text)
        return None if end is None else before + end

    def _begin_call(self, name: str, rest: str) -> bool:
        if name not in self._expected.tools:
            return self._no_call()
        self._deltas += self._allowed(Call(self._calls, name))
        self._mode, self._scan, self._buffer = _Mode.ARGUMENTS, _ObjectScan(), rest
        return True

    def _whole_call(self, text: str, rest: str) -> bool:
        """An object that ended, and whose name did not come first, or that has no arguments."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return self._no_call()
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
        if not isinstance(name, str) or name not in self._expected.tools or not isinstance(arguments, dict):
            return self._no_call()
        written = json.dumps(arguments, ensure_ascii=False)
        self._deltas += self._allowed(Call(self._calls, name), Arguments(self._calls, written))
        self._buffer = rest
        return self._end_call()

    def _no_call(self) -> bool:
        """The opening was content; what follows it is read again, as content."""
        if self._opening:
            self._deltas.append(Content(self._opening))
        self._opening, self._mode, self._skip_space = "", _Mode.CONTENT, False
        return True

    def _arguments(self, final: bool) -> bool:
        end = self._scan.end_in(self._buffer)
        taken = self._buffer[:end]
        if taken:
            self._deltas += self._allowed(Arguments(self._calls, taken))
        self._buffer = self._buffer[len(taken) :]
        if end is None:
            return False
        assert self._dialect is not None
        if not self._dialect.enclosed:
            return self._end_call()
        self._mode, self._scan = _Mode.TAIL, _ObjectScan(depth=1)
        return True

    def _tail(self, final: bool) -> bool:
        end = self._scan.end_in(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        return False if end is None else self._end_call()

    def _end_call(self) -> bool:
        self._calls += 1
        self._mode = _Mode.AFTER
        return True

    def _after(self, final: bool) -> bool:
        dialect, text = self._dialect, self._buffer.lstrip()
        assert dialect is not None
        if not final and (not text or any(len(text) < len(m) and m.startswith(text) for m in (dialect.closer, dialect.separator))):
            return False
        if dialect.separator and text.startswith(dialect.separator):
            self._begin_head(dialect.separator, text[len(dialect.separator) :])
            return True
        self._buffer = text.removeprefix(dialect.closer)
        self._mode, self._skip_space = _Mode.CONTENT, True
        return True

    def _allowed(self, *deltas: Call | Arguments) -> Collection[Call | Arguments]:
        most = self._expected.max_calls
        return [delta for delta in deltas if most is None or delta.index < most]


class _ObjectScan:
    """Where a JSON object ends, that comes in pieces."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = self._escaped = False

    def end_in(self, piece: str) -> int | None:
        """How much of ``piece`` belongs to the object; None: all of it, and there is more to come."""
        for at, char in enumerate(piece):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that is the beginning of ``mark``."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)
