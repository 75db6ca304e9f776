"""``midsentence submit`` and ``midsentence jobs ...``: thin commands over the HTTP API."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.errors import SettingsError
from service.processes import Exit
from service.settings import load_settings

if TYPE_CHECKING:
    from service.client import JobClient

jobs_app = typer.Typer(help="List, show, follow and cancel jobs.", no_args_is_help=True)

Url = Annotated[
    str | None,
    typer.Option("--url", envvar="MIDSENTENCE_URL", help="Where the API is. Default: this machine, at the configured port."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]


def connect(url: str | None, *, patience: float) -> "JobClient":
    from service.client import JobClient

    return JobClient(client_url(url), api_key=api_key(), patience=patience)


def client_url(url: str | None) -> str:
    return url or load_settings().settings.client_url


def api_key() -> str:
    """No flag: what stands on a command line, everybody on this machine can read."""
    return os.environ.get("MIDSENTENCE_API_KEY", "")


def submit(
    prompt: Annotated[str | None, typer.Argument(help="The prompt. '-' or nothing: read it from stdin.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from this file.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's chat message.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Default: what the context holds.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 takes the most likely token.")] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option(help="Default: drawn at random.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the text; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to exactly --max-tokens.")] = False,
    priority: Annotated[int | None, typer.Option(help="-100 to 100; higher runs first.")] = None,
    deadline: Annotated[float | None, typer.Option(help="Seconds; the job fails when it is not done by then.")] = None,
    idempotency_key: Annotated[str | None, typer.Option(help="The same key and job: the same job, however often.")] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Print the id and leave; the job runs on.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the finished job as JSON instead of its text.")] = False,
    url: Url = None,
) -> None:
    """Submit a job and stream its text. The job lives in the server: Ctrl-C leaves it running."""
    text = _read_prompt(prompt, file)
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or None,
        "ignore_eos": ignore_eos or None,
        "priority": priority,
        "deadline_seconds": deadline,
    }
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    body |= {name: value for name, value in given.items() if value is not None}
    with connect(url, patience=600.0) as client:
        job_id = client.submit(body, idempotency_key=idempotency_key)
        if no_wait:
            print(job_id)
            return
        raise typer.Exit(_follow(client, job_id, as_json=as_json, max_tokens=max_tokens))


@jobs_app.command("list")
def list_jobs(
    status: Annotated[str | None, typer.Option(help="Only these: queued, in_progress, completed, ...")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="Jobs for each page.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="Go on after an earlier page.")] = None,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Jobs, newest first."""
    from service.client_views import print_jobs

    with connect(url, patience=0.0) as client:
        page = client.jobs(status=status, limit=limit, cursor=cursor)
    print_json(page) if as_json else print_jobs(page)


@jobs_app.command("show")
def show(job_id: JobId, as_json: AsJson = False, url: Url = None) -> None:
    """One job: status, times, usage, recovery, text."""
    from service.client_views import print_job

    with connect(url, patience=0.0) as client:
        job = client.job(job_id)
    print_json(job) if as_json else print_job(job)


@jobs_app.command("tail")
def tail(
    job_id: JobId,
    after: Annotated[int, typer.Option(min=0, help="Begin after this many tokens.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the finished job as JSON instead of its text.")] = False,
    url: Url = None,
) -> None:
    """Stream a job's text, from its beginning, to its end."""
    with connect(url, patience=600.0) as client:
        raise typer.Exit(_follow(client, job_id, after=after, as_json=as_json))


@jobs_app.command("cancel")
def cancel(
    job_ids: Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids of the jobs to cancel.")], url: Url = None
) -> None:
    """End jobs at once. One that has ended already stays as it is."""
    with connect(url, patience=0.0) as client:
        for job_id in job_ids:
            print(f"{job_id} {client.cancel(job_id)['status']}")


def _follow(client: "JobClient", job_id: str, *, as_json: bool, after: int = 0, max_tokens: int | None = None) -> Exit:
    from service.client_views import StreamView

    view = StreamView(job_id, show_text=not as_json, max_tokens=max_tokens)
    try:
        for event in client.follow(job_id, after=after):
            view.show(event)
    except KeyboardInterrupt:
        view.left()
        raise typer.Exit(130) from None
    except BrokenPipeError:  # `... | head`: the reader has enough; keep Python from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    if as_json:
        print_json(client.job(job_id))
    return Exit.FAILED if view.failed else Exit.OK


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise SettingsError("the prompt was given twice: as an argument and with --file")
    if file is not None:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"cannot read the prompt from {file}: {error}") from error
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin.isatty():
        print("Type the prompt; end with Ctrl-D.", file=sys.stderr)
    return sys.stdin.read()


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))
