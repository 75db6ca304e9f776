"""Logs of all processes: one JSON object per line on stderr (text on a terminal), loggers named ``midsentence.*``.

Job and request ids travel in context variables, so that every line written while serving one carries them. Prompts and tokens are
personal data and are never logged: ids, sizes and timings only. ``_withhold`` is the second line of defence.
"""

import logging
import sys
from contextlib import AbstractContextManager
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

Format = Literal["auto", "json", "console"]

#: Keys whose values are what people wrote or were answered, or secrets.
WITHHELD = frozenset({"prompt", "messages", "text", "tokens", "token_ids", "output", "body", "authorization", "password"})

#: Libraries that log each request or download at INFO.
QUIET = (
    "uvicorn.error",
    "httpx",
    "httpcore",
    "urllib3",
    "filelock",
    "transformers",
    "huggingface_hub",
    "numba",
    "asyncio",
    "uvicorn.access",
)


def configure(level: str = "info", format: Format = "auto", *, process: str = "", stream: TextIO | None = None) -> None:
    """Send structlog's records and the standard library's (so uvicorn's) through one chain. ``process``: engine, api ..."""
    target = stream or sys.stderr
    as_text = format == "console" or (format == "auto" and target.isatty())
    shared = _shared_processors(process)
    renderers: list[Processor] = (
        [structlog.dev.ConsoleRenderer(colors=target.isatty(), exception_formatter=structlog.dev.plain_traceback)]
        if as_text
        else [structlog.processors.format_exc_info, _in_order, structlog.processors.JSONRenderer(ensure_ascii=False)]
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _withhold, *renderers],
        )
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """``get_logger("engine")`` is the logger ``midsentence.engine``."""
    return structlog.stdlib.get_logger(f"midsentence.{name}")


def bound(*, job_id: str | None = None, request_id: str | None = None) -> AbstractContextManager[None]:
    """Every line logged inside carries these ids, in whatever function or library."""
    ids = {"job_id": job_id, "request_id": request_id}
    return structlog.contextvars.bound_contextvars(**{key: value for key, value in ids.items() if value})


def _shared_processors(process: str) -> list[Processor]:
    def name_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        if process:
            event["process"] = process
        return event

    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        name_process,
    ]


def _in_order(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """When, how bad, what; then the rest."""
    event.pop("color_message", None)  # uvicorn's, with escape sequences
    first = {key: event[key] for key in ("timestamp", "level", "logger", "event") if key in event}
    return first | dict(event)


def _withhold(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for key in event.keys() & WITHHELD:
        value: Any = event[key]
        if not isinstance(value, int | float | None):  # a count of tokens is no token
            event[key] = f"<withheld, {len(value)} long>" if hasattr(value, "__len__") else "<withheld>"
    return event
