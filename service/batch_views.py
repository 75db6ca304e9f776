"""How batches look in a terminal. What is told of them goes to stderr; names of files that were written, and tables, to stdout."""

import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from service.client_views import STATUS_STYLE, console, terminal_safe, when


class BatchProgress:
    """A bar on a terminal; elsewhere nothing but the last words."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=self._console, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("sent", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def show(self, batch: dict[str, Any]) -> None:
        counts = batch["request_counts"]
        done = counts["completed"] + counts["failed"]
        failed = f", {counts['failed']} failed" if counts["failed"] else ""
        self._progress.update(self._task, description=f"{batch['status']}{failed}", completed=done, total=counts["total"] or None)


def print_left(file: Path, out: Path, batch: dict[str, Any] | None, *, new: bool) -> None:
    """What Ctrl-C left behind. ``batch``: None before the api said which it is. The same file finds it again, unless it was run
    anew: then it has no key but its id."""
    if batch is None:
        again = "Is it there: midsentence batch list" if new else f"Go on with it: midsentence batch run {file} -o {out}"
        print(f"[what was sent is kept. {again}]", file=sys.stderr)
    else:
        again = f"Look: midsentence batch show {batch['id']}" if new else f"Wait for it: midsentence batch run {file} -o {out}"
        print(f"[the batch goes on. {again}   End it: midsentence batch cancel {batch['id']}]", file=sys.stderr)


def print_errors(batch: dict[str, Any]) -> None:
    """Why a batch did not begin, or that lines have no answer."""
    counts = batch["request_counts"]
    if batch["errors"] is not None:
        for error in batch["errors"]["data"]:
            where = f"line {error['line']}: " if error["line"] is not None else ""
            print(terminal_safe(f"{where}{error['message']} ({error['code']})"), file=sys.stderr)
    print(f"[{batch['id']} {batch['status']}: {counts['completed']} answers, {counts['failed']} failed]", file=sys.stderr)


def print_batches(page: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("batch", "status", "lines", "completed", "failed", "created", "endpoint"):
        table.add_column(heading, no_wrap=heading == "batch")
    for batch in page["data"]:
        counts = batch["request_counts"]
        table.add_row(
            batch["id"],
            Text(batch["status"], style=STATUS_STYLE.get(batch["status"], "")),
            *(str(counts[name]) for name in ("total", "completed", "failed")),
            when(batch["created_at"]),
            batch["endpoint"],
        )
    console().print(table)
    if page["has_more"]:
        print(f"more: midsentence batch list --after {page['last_id']}", file=sys.stderr)


def print_batch(batch: dict[str, Any]) -> None:
    counts = batch["request_counts"]
    ended = next((batch[name] for name in ("completed_at", "failed_at", "expired_at", "cancelled_at") if batch[name]), None)
    rows = {
        "batch": batch["id"],
        "status": batch["status"],
        "endpoint": batch["endpoint"],
        "input": batch["input_file_id"],
        "lines": f"{counts['total']}: {counts['completed']} with an answer, {counts['failed']} failed",
        "created": when(batch["created_at"]),
        "expires": when(batch["expires_at"]),
        "ended": when(ended),
        "output": batch["output_file_id"] or "",
        "errors": batch["error_file_id"] or "",
    }
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value))
    console().print(table)
    for error in (batch["errors"] or {"data": []})["data"]:
        print(terminal_safe(f"line {error['line']}: {error['message']} ({error['code']})"))
