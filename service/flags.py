"""Command-line flags made from ``Settings``: one flag for each setting, so that the two cannot drift apart.

Each can be given as a variable too: ``--page-size`` is ``MIDSENTENCE_PAGE_SIZE``.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from service.settings import Settings, as_text, flag, group_of, load_settings

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file with settings. Default: midsentence.toml in the data directory, if it is there."),
]


def with_settings(*names: str) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Give a command flags for the settings ``names`` (all, when empty) and ``--config``; it gets ``loaded: LoadedSettings``.

    Values are handed on as text: pydantic checks them, with the same words for a flag, a variable and the file.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., None]:
        chosen = names or tuple(Settings.model_fields)

        @wraps(command)
        def run(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in chosen}
            command(loaded=load_settings(given, config=arguments.pop("config")), **arguments)

        own = [p for p in inspect.signature(command).parameters.values() if p.name != "loaded"]
        flags = [_parameter(name) for name in chosen]
        config = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile)
        keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        run.__signature__ = inspect.Signature([*keyword_only, *flags, config])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in [*keyword_only, *flags, config]}
        del run.__wrapped__  # typer would look through it for the annotations
        return run

    return decorate


def _parameter(name: str) -> inspect.Parameter:
    field = Settings.model_fields[name]
    switch = field.annotation is bool
    default = "" if field.default is None or switch else f" Default: {as_text(field.default)}."
    option = typer.Option(
        flag(name),
        help=f"{field.description}{default}",
        show_default=False,
        metavar=None if switch else _metavar(field.annotation),
        rich_help_panel=f"{group_of(field)}",
    )
    annotation = Annotated[bool | None, option] if switch else Annotated[str | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _metavar(annotation: object) -> str:
    """``N`` for whole numbers, the words themselves for a choice."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(annotation) is Literal:
        return "|".join(map(str, kinds))
    kind = kinds[0] if kinds else annotation
    return "N" if kind is int else "SECONDS" if kind is float else "PATH" if kind is Path else "TEXT"
