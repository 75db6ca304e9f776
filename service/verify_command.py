"""``midsentence verify``: is all that is durable as it was promised? Redis, pool file and data directory; reads only.

Works beside a running service: what looks wrong is read again, so that only what no writer explains is said.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from service.borrowed_redis import borrowed_redis
from service.errors import ServiceError
from service.processes import Exit
from service.settings import Settings
from service.verification import Verification
from storage.findings import Finding, Severity
from storage.session import Session

_EXIT = {Severity.NOTE: Exit.OK, Severity.REPAIRABLE: Exit.FAILED, Severity.DAMAGE: Exit.USAGE}
_STYLE = {Severity.NOTE: "", Severity.REPAIRABLE: "yellow", Severity.DAMAGE: "bold red"}
_ORDER = list(_EXIT)  #: from harmless to worst
_SHOWN = 50  #: findings in the table; JSON has all
_TIMEOUT = 30.0


class VerifyError(ServiceError):
    """It could not be checked, which says nothing of whether it is good."""


@dataclass(frozen=True, slots=True)
class Report:
    """``--json`` prints it as it is. Fields are added, never changed."""

    verdict: str  #: clean, repairable or damage
    data_dir: str
    service_running: bool  #: somebody wrote, or could have written, meanwhile
    seconds: float
    store: dict[str, Any]  #: as Redis has it, and as each mark of the directory says
    checked: dict[str, int]
    findings: list[Finding]  #: worst first


def main(settings: Settings, *, as_json: bool) -> int:
    """Print the report; the exit code of its worst finding. What prevents a check is raised (exit code 78)."""
    directory = settings.data_dir
    if not directory.is_dir():
        raise VerifyError(f"there is no data directory {directory}", "name it with --data-dir")
    if settings.redis_url is None and not (directory / "redis").is_dir():
        raise VerifyError(f"no embedded Redis ever ran in {directory}", "name the Redis of this installation with --redis-url")
    report = _verify(settings)
    print(json.dumps(asdict(report), indent=2)) if as_json else _print(report)
    return _EXIT[_worst(report.findings)]


def _verify(settings: Settings) -> Report:
    began = time.monotonic()
    with borrowed_redis(settings) as borrowed, _progress() as progress:
        session = Session(borrowed.url, connections=1, timeout=_TIMEOUT, client_name="midsentence-verify")
        try:
            verification = Verification(settings, session, live=not borrowed.started)
            jobs, pages = (progress.add_task(what, total=None) for what in ("jobs", "pages"))
            verification.run(
                on_jobs=lambda done, total: progress.update(jobs, completed=done, total=total),
                on_pages=lambda done, total: progress.update(pages, completed=done, total=total),
            )
        finally:
            session.close()
    findings = sorted(verification.findings, key=lambda finding: -_ORDER.index(finding.severity))
    worst = _worst(findings)
    return Report(
        verdict="clean" if worst is Severity.NOTE else worst.value,
        data_dir=str(settings.data_dir),
        service_running=verification.service_running,
        seconds=round(time.monotonic() - began, 3),
        store=verification.store(),
        checked=dict(verification.checked),
        findings=findings,
    )


def _worst(findings: list[Finding]) -> Severity:
    return max((finding.severity for finding in findings), key=_ORDER.index, default=Severity.NOTE)


def _progress() -> Progress:
    """On stderr, and only where somebody watches."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def _print(report: Report) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    if report.findings:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("", "where", "what", "fix"):
            table.add_column(heading, overflow="fold")
        for finding in report.findings[:_SHOWN]:
            severity = Text(finding.severity, style=_STYLE[finding.severity])
            table.add_row(severity, Text(finding.where), Text(finding.what), Text(finding.fix))
        console.print(table)
        if (more := len(report.findings) - _SHOWN) > 0:
            console.print(f"and {more} more: --json has all")
    counts = ", ".join(f"{what} {count:,}" for what, count in report.checked.items())
    console.print(f"{report.verdict}: checked {counts} in {report.seconds:.1f} s", highlight=False)
    if report.service_running:
        console.print("a running service writes meanwhile: what it explains is not said", highlight=False)
