"""How jobs and streams look in a terminal. Text of a model goes to stdout; everything about it goes to stderr."""

import sys
import time
from datetime import UTC, datetime
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from service.client import TERMINAL_EVENTS, Event

#: A model may write escape sequences; a terminal must not obey them.
_UNSAFE = dict.fromkeys((*range(9), *range(11, 32), 127, *range(128, 160)))
STATUS_STYLE = {"completed": "green", "incomplete": "green", "in_progress": "cyan", "failed": "red", "cancelled": "yellow"}


def terminal_safe(text: str) -> str:
    return text.translate(_UNSAFE)


class StreamView:
    """Writes a stream's text as it comes. On a terminal that shows the text, it is the progress; else a line on stderr is."""

    def __init__(
        self, job_id: str, *, show_text: bool, max_tokens: int | None = None, out: TextIO | None = None, err: TextIO | None = None
    ) -> None:
        self._job_id = job_id
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._show_text = show_text
        self._max_tokens = max_tokens
        self._text_on_terminal = show_text and self._out.isatty()
        self._progress_line = self._err.isatty() and not self._text_on_terminal
        self._tokens = 0
        self._began: float | None = None
        self._at_line_start = True
        self.failed = False

    def show(self, event: Event) -> None:
        if event.kind == "token":
            self._token(event.data)
        elif event.kind == "lost":
            self._note(f"connection lost after token {event.data['after']} ({event.data['reason']}); resuming")
        elif event.kind == "resumed":
            self._note(f"resumed after {event.data['pause']:.1f} s, at token {event.data['after']}")
        elif event.kind == "recovered":
            restored, replayed = event.data["pages_restored"], event.data["tokens_replayed"]
            self._note(f"the engine went away and came back: {restored} pages restored, {replayed} tokens replayed")
        elif event.kind in TERMINAL_EVENTS:
            self._end(event)
        elif self._progress_line:
            self._status_line(event.kind)

    def left(self) -> None:
        self._note(
            f"the job goes on. Follow it: midsentence jobs tail {self._job_id}   End it: midsentence jobs cancel {self._job_id}"
        )

    def _token(self, data: dict[str, Any]) -> None:
        self._began = self._began or time.monotonic()
        self._tokens += len(data["token_ids"])
        if self._show_text and data["text"]:
            text = terminal_safe(data["text"]) if self._text_on_terminal else data["text"]
            self._out.write(text)
            self._out.flush()
            self._at_line_start = text.endswith("\n") if text else self._at_line_start
        if self._progress_line:
            total = f"/{self._max_tokens}" if self._max_tokens else ""
            self._status_line(f"{self._tokens}{total} tokens, {self._rate():.1f} a second")

    def _end(self, event: Event) -> None:
        self.failed = event.kind != "done"
        usage, error = event.data.get("usage") or {}, event.data.get("error")
        if self._show_text and self._out.isatty() and not self._at_line_start:
            self._out.write("\n")
            self._out.flush()
            self._at_line_start = True
        if error:
            self._note(f"{event.kind}: {error['message']} ({error['code']})")
        elif self.failed:
            self._note(event.kind)
        elif self._err.isatty():
            self._note(
                f"{usage.get('completion_tokens', self._tokens)} tokens, {self._rate():.1f} a second, "
                f"finish reason {event.data.get('finish_reason')}, job {self._job_id}"
            )

    def _rate(self) -> float:
        passed = time.monotonic() - self._began if self._began is not None else 0.0
        return self._tokens / passed if passed > 0 else 0.0

    def _status_line(self, text: str) -> None:
        self._err.write(f"\r\x1b[K{text}")
        self._err.flush()

    def _note(self, text: str) -> None:
        if self._progress_line:
            self._err.write("\r\x1b[K")
        elif self._text_on_terminal and self._err.isatty() and not self._at_line_start:
            self._err.write("\n")
        self._err.write(f"[{text}]\n")
        self._err.flush()
        self._at_line_start = True


def print_jobs(page: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("job", "status", "tokens", "created", "recoveries", "model"):
        table.add_column(heading, no_wrap=heading == "job")
    for job in page["data"]:
        table.add_row(
            job["id"],
            Text(job["status"], style=STATUS_STYLE.get(job["status"], "")),
            str(job["usage"]["completion_tokens"]),
            when(job["created_at"]),
            str(job["recovery"]["count"] or ""),
            job["model"],
        )
    console().print(table)
    if page.get("next_cursor"):
        print(f"more: midsentence jobs list --cursor {page['next_cursor']}", file=sys.stderr)


def print_job(job: dict[str, Any]) -> None:
    usage, error, again = job["usage"], job["error"], job["recovery"]
    rows = {
        "job": job["id"],
        "status": job["status"] + (f": {error['message']} ({error['code']})" if error else ""),
        "model": job["model"],
        "created": when(job["created_at"]),
        "started": when(job["started_at"]),
        "finished": when(job["finished_at"]),
        "tokens": f"{usage['prompt_tokens']} prompt ({usage['cached_tokens']} cached), {usage['completion_tokens']} generated",
        "recovery": f"{again['count']} times, {again['pages_restored']} pages restored, {again['tokens_replayed']} tokens replayed",
        "finish": job["output"]["finish_reason"] or "",
    }
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value))
    terminal = console()
    terminal.print(table)
    if job["output"]["text"]:
        terminal.print()
        text = job["output"]["text"]
        print(terminal_safe(text) if terminal.is_terminal else text)


def console() -> Console:
    """A pipe has no width: nothing is to be cut off there."""
    return Console(width=None if sys.stdout.isatty() else 200)


def when(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
