"""What the demo shows: text as it is written, the kill, the pause, the going on. Readable without a terminal too."""

import sys
import time

from rich.console import Console
from rich.rule import Rule

from service.client_views import terminal_safe

_WRAP = 100


class DemoView:
    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(width=None if sys.stdout.isatty() else _WRAP, highlight=False)
        self._column = 0
        self._waiting_since: float | None = None
        self._style = ""

    def headline(self, text: str) -> None:
        self._new_line()
        self._console.print()
        self._console.print(Rule(f"[bold]{text}[/]", align="left", characters="─"))

    def say(self, text: str, style: str = "") -> None:
        self._new_line()
        self._console.print(text, style=style or None, markup=False)

    def check(self, ok: bool, text: str) -> None:
        self._new_line()
        mark, style = ("✓", "green") if ok else ("✗", "bold red")
        self._console.print(f"  [{style}]{mark}[/] {text}", soft_wrap=True)

    def begin_text(self) -> None:
        self._style = ""

    def token(self, text: str) -> None:
        self._write(terminal_safe(text), self._style)

    def killed(self, name: str, pid: int, seen: int) -> None:
        self._new_line()
        shown = {"api": "the API", "redis": "Redis"}.get(name, f"the {name}")
        self._console.print(f"  [bold red]⚡ kill -9 {pid}[/] [red]({shown}, after token {seen}, in the middle of a sentence)[/]")
        self.begin_wait()
        self._style = "cyan"

    def begin_wait(self) -> None:
        self._waiting_since = time.monotonic()

    def end_wait(self) -> None:
        if self._waiting_since is not None and self._console.is_terminal:
            self._raw("\r\x1b[K")
        self._waiting_since = None

    def tick(self) -> None:
        """Called often: on a terminal the pause can be watched."""
        if self._waiting_since is not None and self._console.is_terminal:
            self._raw(f"\r\x1b[K  … {time.monotonic() - self._waiting_since:.1f} s")

    def resumed(self, pause: float) -> None:
        self.end_wait()
        self._console.print(f"  [yellow]… {pause:.1f} s later it goes on:[/]")
        self._column = 0

    def _write(self, text: str, style: str) -> None:
        """Tokens end to end, broken at spaces near the margin."""
        width = min(self._console.width, _WRAP) - 2
        for piece in _pieces(text):
            if piece == "\n" or (self._column + len(piece) > width and piece.startswith(" ")):
                self._new_line()
            if self._column == 0:
                piece = piece.lstrip()
            if not piece:
                continue
            if self._column == 0:
                self._console.out("  ", end="")
                self._column = 2
            self._console.out(piece, style=style or None, end="")
            self._column += len(piece)
        self._console.file.flush()

    def _raw(self, text: str) -> None:
        """Past rich, which drops the carriage return that writes a line over."""
        self._console.file.write(text)
        self._console.file.flush()

    def _new_line(self) -> None:
        if self._column:
            self._console.out("")
            self._column = 0


def _pieces(text: str) -> list[str]:
    """Words with the space before them, and line ends by themselves."""
    pieces: list[str] = []
    for character in text:
        if character in " \n" or not pieces or pieces[-1] == "\n":
            pieces.append(character)
        else:
            pieces[-1] += character
    return pieces
