"""``midsentence config show``."""

import json
import sys

from rich.console import Console
from rich.table import Table

from service.settings import LoadedSettings, Settings, group_of, redacted


def show(loaded: LoadedSettings, *, as_json: bool) -> None:
    """Every setting with its value and what set it. Passwords in URLs are not shown."""
    rows = [(name, value, loaded.sources.get(name, "default")) for name, value in loaded.settings]
    if as_json:
        shown = {
            name: {"value": value if isinstance(value, int | float | None) else redacted(name, value), "source": source}
            for name, value, source in rows
        }
        print(json.dumps(shown, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("setting", "value", "from"):
        table.add_column(heading, overflow="fold")
    group = ""
    for name, value, source in rows:
        if (its_group := group_of(Settings.model_fields[name])) != group:
            group = its_group
            table.add_row(f"[bold]{group}[/]")
        text = "(unset)" if value is None else redacted(name, value)
        table.add_row(f"  {name}", text, source, style="dim" if source == "default" else None)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
