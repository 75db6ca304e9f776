"""The output of a response, as its tokens come: items, and the events that tell of them. A function of the token log, and of how
it ended, alone.

An answer that can be nothing but a message is one from the beginning; any other begins an item with each part of it that comes.
One without any part is an empty message.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from service.api.openai import response_items
from service.api.openai.parts import Arguments, Call, Content, Delta, Reasoning
from service.api.openai.readings import Reading, call_id
from service.api.openai.response_items import Item
from service.tokenization import Tokenization
from storage.records import JobRecord, JobStatus, LogEntry

Event = tuple[str, dict[str, Any]]  #: its type and its fields, without its number
Logprobs = Callable[[Sequence[LogEntry]], list[Item]]
_ENDED = {JobStatus.COMPLETED: "completed"}  #: of the item that was under way


class _Told(Protocol):
    """One item, while it is told."""

    kind: str  #: of its id

    def item(self, status: str) -> Item: ...

    def begin(self) -> list[Event]: ...

    def more(self, text: str, logprobs: list[Item]) -> list[Event]: ...

    def end(self, status: str) -> list[Event]: ...


class _Part(ABC):
    """An item with one content part."""

    def __init__(self, item_id: str, index: int, name: str) -> None:
        self._place = {"item_id": item_id, "output_index": index, "content_index": 0}
        self._name = name
        self._pieces: list[str] = []

    def item(self, status: str) -> Item:
        return self._shown(status, [self._part()])

    def begin(self) -> list[Event]:
        added = {"output_index": self._place["output_index"], "item": self._shown("in_progress", [])}
        return [("response.output_item.added", added), ("response.content_part.added", {**self._place, "part": self._part()})]

    def end(self, status: str) -> list[Event]:
        part = self._part()
        told: Item = {name: part[name] for name in ("text", "logprobs") if name in part}
        return [
            (f"response.{self._name}.done", {**self._place, **told}),
            ("response.content_part.done", {**self._place, "part": part}),
            ("response.output_item.done", {"output_index": self._place["output_index"], "item": self.item(status)}),
        ]

    @abstractmethod
    def _part(self) -> Item: ...

    @abstractmethod
    def _shown(self, status: str, content: list[Item]) -> Item: ...


class _Message(_Part):
    kind = "msg"

    def __init__(self, item_id: str, index: int) -> None:
        super().__init__(item_id, index, "output_text")
        self._logprobs: list[Item] = []

    def more(self, text: str, logprobs: list[Item]) -> list[Event]:
        self._pieces.append(text)
        self._logprobs += logprobs
        return [("response.output_text.delta", {**self._place, "delta": text, "logprobs": logprobs})]

    def _part(self) -> Item:
        return response_items.output_text("".join(self._pieces), [*self._logprobs])

    def _shown(self, status: str, content: list[Item]) -> Item:
        return response_items.output_message(str(self._place["item_id"]), status, content)


class _Thought(_Part):
    kind = "rs"

    def __init__(self, item_id: str, index: int) -> None:
        super().__init__(item_id, index, "reasoning_text")

    def more(self, text: str, logprobs: list[Item]) -> list[Event]:
        self._pieces.append(text)
        return [("response.reasoning_text.delta", {**self._place, "delta": text})]

    def _part(self) -> Item:
        return {"type": "reasoning_text", "text": "".join(self._pieces)}

    def _shown(self, status: str, content: list[Item]) -> Item:
        return response_items.output_reasoning(str(self._place["item_id"]), status, content)


class _FunctionCall:
    kind = "fc"

    def __init__(self, item_id: str, index: int, the_call: str, name: str) -> None:
        self._id = item_id
        self._index = index
        self._call_id = the_call
        self._name = name
        self._pieces: list[str] = []

    def item(self, status: str) -> Item:
        return response_items.output_call(self._id, self._call_id, self._name, "".join(self._pieces), status)

    def begin(self) -> list[Event]:
        return [("response.output_item.added", {"output_index": self._index, "item": self.item("in_progress")})]

    def more(self, text: str, logprobs: list[Item]) -> list[Event]:
        self._pieces.append(text)
        delta = {"item_id": self._id, "output_index": self._index, "delta": text}
        return [("response.function_call_arguments.delta", delta)]

    def end(self, status: str) -> list[Event]:
        done = {"item_id": self._id, "output_index": self._index, "arguments": "".join(self._pieces)}
        return [
            ("response.function_call_arguments.done", done),
            ("response.output_item.done", {"output_index": self._index, "item": self.item(status)}),
        ]


class ResponseOutput:
    """``logprobs``: shows those of tokens."""

    def __init__(self, record: JobRecord, tokenization: Tokenization, logprobs: Logprobs) -> None:
        self._job_id = record.job_id
        self._reading = Reading(record, tokenization)
        self._shown_logprobs = logprobs
        self._ended: list[Item] = []
        self._open: _Told | None = None
        self._counts: dict[str, int] = {}  #: items by kind
        self._untold: list[LogEntry] = []  #: tokens of which no event told yet

    @property
    def items(self) -> list[Item]:
        """All there is by now, the one that is under way last."""
        return [*self._ended, *([self._open.item("in_progress")] if self._open is not None else [])]

    @property
    def reasoning_tokens(self) -> int:
        return self._reading.reasoning_tokens

    def begin(self) -> list[Event]:
        return self._begin(_Message(*self._next(_Message.kind))) if self._reading.only_content else []

    def add(self, entry: LogEntry) -> list[Event]:
        self._untold.append(entry)
        deltas = self._reading.add(entry)
        return self._tell(deltas) if deltas else []

    def end(self, status: JobStatus) -> list[Event]:
        told = self._tell(self._reading.finish())
        if self._open is None and not self._ended:
            told += self._begin(_Message(*self._next(_Message.kind)))
        return told + self._end(_ENDED.get(status, "incomplete"))

    def _tell(self, deltas: Sequence[Delta]) -> list[Event]:
        """The tokens that led to these are told of with the first text among them, if there is any."""
        told: list[Event] = []
        for delta in deltas:
            match delta:
                case Content(text):
                    told += self._more(_Message, text, self._shown_logprobs(_of_text(self._untold)))
                    self._untold = []
                case Reasoning(text):
                    told += self._more(_Thought, text, [])
                case Call(index, name):
                    told += self._end("completed")
                    told += self._begin(_FunctionCall(*self._next(_FunctionCall.kind), call_id(self._job_id, index), name))
                case Arguments(_, text):
                    assert self._open is not None
                    told += self._open.more(text, [])
        if deltas:
            self._untold = []
        return told

    def _more(self, kind: type[_Message] | type[_Thought], text: str, logprobs: list[Item]) -> list[Event]:
        told: list[Event] = []
        if self._open is None or self._open.kind != kind.kind:
            told += self._end("completed")
            told += self._begin(kind(*self._next(kind.kind)))
        assert self._open is not None
        return told + self._open.more(text, logprobs)

    def _begin(self, item: _Told) -> list[Event]:
        self._open = item
        self._counts[item.kind] = self._counts.get(item.kind, 0) + 1
        return item.begin()

    def _end(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        self._ended.append(item.item(status))
        return item.end(status)

    def _next(self, kind: str) -> tuple[str, int]:
        """Id and index of the next item."""
        return response_items.output_id(self._job_id, kind, self._counts.get(kind, 0)), len(self._ended)


def _of_text(entries: Sequence[LogEntry]) -> Sequence[LogEntry]:
    """The tokens that made the text: not those behind its end, such as the end-of-text token."""
    last = max((index for index, entry in enumerate(entries) if entry.text), default=-1)
    return entries[: last + 1]
