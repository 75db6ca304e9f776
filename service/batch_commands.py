"""``midsentence batch ...``: a file of requests in, a file of answers out, over the HTTP API."""

import json
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.client_commands import AsJson, Url, api_key, client_url, print_json
from service.errors import SettingsError
from service.processes import Exit

if TYPE_CHECKING:
    from service.batch_client import BatchClient

batch_app = typer.Typer(help="Run, list, show, cancel and download batches.", no_args_is_help=True)

BatchId = Annotated[str, typer.Argument(metavar="BATCH", help="The batch's id.")]
_LOOK_EVERY = 0.5


def _connect(url: str | None, *, patience: float) -> "BatchClient":
    from service.batch_client import BatchClient

    return BatchClient(client_url(url), api_key=api_key(), patience=patience)


@batch_app.command("run")
def run(
    file: Annotated[Path, typer.Argument(help="JSON lines, as OpenAI's batches have them.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the answers go. Lines without one go to OUT.errors.")],
    new: Annotated[bool, typer.Option("--new", help="Run it anew, also where this file was run before.")] = False,
    url: Url = None,
) -> None:
    """Run a file of requests and wait for the answers. Run again, it finds its batch and goes on; Ctrl-C leaves that running."""
    from service.batch_client import key_of
    from service.batch_views import BatchProgress, print_errors, print_left

    endpoint = _endpoint(file)
    key = key_of(file) + (f"-{secrets.token_hex(8)}" if new else "")
    with _connect(url, patience=600.0) as client:
        batch = None
        try:
            batch = client.create_batch(client.upload(file, idempotency_key=key), endpoint, idempotency_key=key)
            with BatchProgress() as progress:
                batch = _wait(client, batch, progress)
        except KeyboardInterrupt:
            print_left(file, out, batch, new=new)
            raise typer.Exit(130) from None
        print_errors(batch)
        raise typer.Exit(_download(client, batch, out))


@batch_app.command("list")
def list_batches(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Batches for each page.")] = 20,
    after: Annotated[str | None, typer.Option(help="Go on after this batch.")] = None,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Batches, newest first."""
    from service.batch_views import print_batches

    with _connect(url, patience=0.0) as client:
        page = client.batches(limit=limit, after=after)
    print_json(page) if as_json else print_batches(page)


@batch_app.command("show")
def show(batch_id: BatchId, as_json: AsJson = False, url: Url = None) -> None:
    """One batch: status, counts, times, and what was wrong with its lines."""
    from service.batch_views import print_batch

    with _connect(url, patience=0.0) as client:
        batch = client.batch(batch_id)
    print_json(batch) if as_json else print_batch(batch)


@batch_app.command("cancel")
def cancel(batch_id: BatchId, url: Url = None) -> None:
    """End a batch. Lines that have their answers keep them."""
    with _connect(url, patience=0.0) as client:
        print(f"{batch_id} {client.cancel_batch(batch_id)['status']}")


@batch_app.command("download")
def download(
    batch_id: BatchId,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the answers go. Lines without one go to OUT.errors.")],
    url: Url = None,
) -> None:
    """The answers of a batch that has ended."""
    from service.batch_client import ENDED

    with _connect(url, patience=0.0) as client:
        batch = client.batch(batch_id)
        if batch["status"] not in ENDED:
            raise SettingsError(f"{batch_id} is {batch['status']}: its answers are there when it has ended")
        raise typer.Exit(_download(client, batch, out))


def _endpoint(file: Path) -> str:
    """Of the first line; the server holds the others against it."""
    with file.open("rb") as lines:
        first = lines.readline(8 << 20)
    try:
        url = json.loads(first)["url"]
    except (ValueError, KeyError, TypeError):
        url = None
    if not isinstance(url, str):
        raise SettingsError(f"the first line of {file} is no request: it needs custom_id, method, url and body")
    return url


def _wait(client: "BatchClient", batch: dict[str, Any], progress: Any) -> dict[str, Any]:
    from service.batch_client import ENDED

    while True:
        progress.show(batch)
        if batch["status"] in ENDED:
            return batch
        time.sleep(_LOOK_EVERY)
        batch = client.batch(batch["id"])


def _download(client: "BatchClient", batch: dict[str, Any], out: Path) -> Exit:
    """Answers and errors, each where there are some."""
    errors = out.with_name(f"{out.name}.errors")
    for name, path in (("output_file_id", out), ("error_file_id", errors)):
        if batch[name] is not None:
            client.download(batch[name], path)
            print(path)
    return Exit.OK if batch["status"] == "completed" and not batch["request_counts"]["failed"] else Exit.FAILED
