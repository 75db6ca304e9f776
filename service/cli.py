"""The command ``midsentence``. Heavy imports live inside the commands, so that ``--help`` is quick and the api loads no torch."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.errors import CacheFolderUnusable, ModelError
from service.batch_commands import batch_app
from service.children import LastExit, refusal_file
from service.client_commands import jobs_app, submit
from service.errors import RedisNotRunning, ServiceError, SettingsError, Stopped
from service.flags import with_settings
from service.processes import (
    Exit,
    FileLock,
    check_surroundings,
    die_with_parent,
    harden,
    prepare_directory,
    write_pid_file,
    write_private,
)
from service.settings import LoadedSettings, Settings
from service.version import own_version
from storage.errors import StorageError

if TYPE_CHECKING:
    from service.worker.standby import Turn

app = typer.Typer(
    name="midsentence",
    help="The server that finishes its sentence: long LLM generation jobs that survive kill -9, token for token.\n\n"
    "Every setting can be a flag, a variable (--page-size is MIDSENTENCE_PAGE_SIZE) or a key of a TOML file (page_size), "
    "in this order. `midsentence config show` lists them.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Settings.", no_args_is_help=True)
app.add_typer(config_app, name="config")
keys_app = typer.Typer(help="API keys.", no_args_is_help=True)
app.add_typer(keys_app, name="keys", rich_help_panel="Operation")
app.add_typer(jobs_app, name="jobs", rich_help_panel="Client")
app.add_typer(batch_app, name="batch", rich_help_panel="Client")
app.command(rich_help_panel="Client")(submit)

#: What ends a command with a message instead of a traceback.
Refusals = (ServiceError, StorageError, ModelError, CacheFolderUnusable)

DeathPipe = Annotated[int | None, typer.Option(hidden=True, help="Descriptor whose end of file is the supervisor's death.")]
LockWait = Annotated[float, typer.Option(hidden=True, help="Seconds to wait for a lock that the process before us still holds.")]
ListenFd = Annotated[int | None, typer.Option(hidden=True, help="The supervisor's listening socket; with it comes its lock.")]
ReadyFd = Annotated[int | None, typer.Option(hidden=True, help="Pipe to write to once an API before us may retire.")]
DemoControls = Annotated[
    bool, typer.Option("--demo-controls", help="Give the dashboard a button that kills the engine. Only where --host is loopback.")
]
KillButton = Annotated[bool, typer.Option("--kill-button", hidden=True, help="Our parent is a supervisor that shows a demo.")]
TurnFd = Annotated[int | None, typer.Option(hidden=True, help="Pipe that says when it is our turn, and how the last life ended.")]
MemoryFd = Annotated[int | None, typer.Option(hidden=True, help="Memory of the serving engine's device pool.")]
Told = Annotated[LastExit, typer.Option("--last-exit", hidden=True, help="How this engine's last life ended.")]


def main() -> None:
    """Entry point. What is refused ends with exit code 78 and a message that names the fix; nothing else is caught."""
    harden()
    try:
        app()
    except Refusals as error:
        print(f"midsentence: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", Exit.CONFIG))


@app.callback(invoke_without_command=True)
def _main(
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if show_version:
        print(f"midsentence {own_version()}")
        raise typer.Exit


# processes ---------------------------------------------------------------------------------------------------------------


@app.command(rich_help_panel="Server")
@with_settings()
def serve(loaded: LoadedSettings, demo_controls: DemoControls = False) -> None:
    """Run everything: the embedded Redis (unless --redis-url), the engine and the API; start again what dies."""
    _start_logging(loaded.settings, "supervisor")
    check_surroundings()
    from service.supervisor import serve as run

    raise typer.Exit(run(loaded.settings, demo_controls=demo_controls))


@app.command(rich_help_panel="Server")
@with_settings()
def api(
    loaded: LoadedSettings,
    death_pipe: DeathPipe = None,
    lock_wait: LockWait = 0.0,
    listen_fd: ListenFd = None,
    ready_fd: ReadyFd = None,
    kill_button: KillButton = False,
) -> None:
    """Run the API alone. Uses the Redis of --redis-url, or the embedded one that serves the data directory."""
    wait = lock_wait if listen_fd is None else None
    _as_process("api", loaded.settings, death_pipe, wait, lambda settings: _run_api(settings, listen_fd, ready_fd, kill_button))


@app.command(rich_help_panel="Server")
@with_settings()
def engine(
    loaded: LoadedSettings,
    death_pipe: DeathPipe = None,
    lock_wait: LockWait = 0.0,
    last_exit: Told = LastExit.CRASH,
    turn_fd: TurnFd = None,
    memory_fd: MemoryFd = None,
) -> None:
    """Run one engine alone. Nobody tells it how its last life ended, so it takes it for a crash."""
    turn: Turn | None = None

    def run(settings: Settings) -> int:
        from service.worker.process import main

        return main(settings, last_exit=last_exit, lock_wait=lock_wait, turn=turn)

    def wait() -> None:
        nonlocal turn
        if turn_fd is None:
            return
        from service.worker import process  # noqa: F401  # while there is time
        from service.worker.standby import wait_for_turn

        turn = wait_for_turn(loaded.settings, turn_fd, memory_fd)
        if turn is None:
            raise typer.Exit

    _as_process("engine", loaded.settings, death_pipe, lock_wait, run, wait)


def _run_api(settings: Settings, listen_fd: int | None, ready_fd: int | None, kill_button: bool) -> int:
    from service.api.server import run
    from service.supervisor import ask_to_kill_engine

    return run(settings, listen_fd, ready_fd, ask_to_kill_engine if kill_button else None)


def _as_process(
    name: str,
    settings: Settings,
    death_pipe: int | None,
    lock_wait: float | None,
    run: Callable[[Settings], int],
    wait: Callable[[], None] = lambda: None,
) -> None:
    """What api and engine share: tied to their parent, logging, a pid file, a last word for the supervisor when they refuse.

    ``lock_wait`` None: the supervisor holds the lock for us, and wrote the pid file. ``wait`` returns when it is our turn to take
    the lock and run.
    """
    if death_pipe is not None:
        die_with_parent(death_pipe)
    _start_logging(settings, name)
    check_surroundings()
    wait()
    prepare_directory(settings.data_dir)
    run_dir = prepare_directory(settings.run_dir)
    try:
        with ExitStack() as held:
            if lock_wait is not None:
                # The lock comes before the pid file: a second one, refused, took the first one's file away with it.
                held.enter_context(FileLock(run_dir / f"{name}.lock", f"an {name} on {settings.data_dir}").acquire(lock_wait))
                held.enter_context(_pid_file(run_dir / f"{name}.pid", keep=death_pipe is not None))
            code = run(_with_redis(settings))
    except Stopped:
        code = Exit.OK
    except Refusals as error:
        if death_pipe is not None:
            write_private(refusal_file(run_dir, name), str(error))
        raise
    raise typer.Exit(code)


@contextmanager
def _pid_file(path: Path, *, keep: bool) -> Iterator[None]:
    """``keep``: it is the supervisor's to remove."""
    write_pid_file(path, os.getpid())
    try:
        yield
    finally:
        if not keep:
            path.unlink(missing_ok=True)


def _with_redis(settings: Settings) -> Settings:
    """Alone and without --redis-url: the embedded Redis of this data directory, if somebody runs it."""
    if settings.redis_url is not None:
        return settings
    from service.redis_server import EmbeddedRedis

    try:
        url = EmbeddedRedis(settings.data_dir).attach()
    except RedisNotRunning as error:
        raise RedisNotRunning(
            f"no --redis-url was given, and no embedded Redis runs in {settings.data_dir}",
            "give --redis-url, or run `midsentence serve`, which starts one",
        ) from error
    return settings.model_copy(update={"redis_url": url})


def _start_logging(settings: Settings, process: str) -> None:
    from service import logs

    logs.configure(settings.log_level, settings.log_format, process=process)


# recovery and checks -----------------------------------------------------------------------------------------------------


@app.command(rich_help_panel="Operation")
@with_settings("data_dir", "redis_url", "model")
def recover(
    loaded: LoadedSettings,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be done: exactly what `serve` will do.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    release: Annotated[bool, typer.Option("--release", help="Give this engine's jobs back to the queue.")] = False,
    fail: Annotated[str | None, typer.Option("--fail", metavar="JOB", help="End this job as failed.")] = None,
    accept_store: Annotated[
        bool, typer.Option("--accept-store", help="Accept a store that lost commits; shows what is known to be lost.")
    ] = False,
) -> None:
    """Bring every job back after a crash, or see what a restart will do."""
    _start_logging(loaded.settings, "recover")
    from service.recover_command import Options
    from service.recover_command import main as run

    options = Options(dry_run=dry_run, as_json=as_json, release=release, fail=fail, accept_store=accept_store)
    code = run(loaded.settings, options)
    raise typer.Exit(code)


@app.command(rich_help_panel="Operation")
@with_settings("data_dir", "redis_url")
def verify(loaded: LoadedSettings, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check everything durable: every log, every page, every key. Changes nothing; needs no model.

    Exit code 0: nothing found, or notes only; 1: what costs time or space, never a token; 2: damage; 78: could not check.
    """
    _start_logging(loaded.settings, "verify")
    from service.verify_command import main as run

    raise typer.Exit(run(loaded.settings, as_json=as_json))


@app.command(rich_help_panel="Operation")
@with_settings()
def doctor(loaded: LoadedSettings) -> None:
    """Check configuration and environment; each problem comes with its fix."""
    from service.doctor import run

    raise typer.Exit(run(loaded))


@app.command(rich_help_panel="Operation")
def demo(
    model: Annotated[str, typer.Option(help="Model to show it with.")] = "demo",
    keep: Annotated[Path | None, typer.Option(help="Keep the data directory here. Default: a temporary one.")] = None,
) -> None:
    """Kill the engine, the API and Redis in the middle of a sentence, and compare with an uninterrupted run."""
    from service.demo import run

    raise typer.Exit(run(model, keep))


@keys_app.command("add")
@with_settings("api_keys_file")
def keys_add(
    loaded: LoadedSettings, tenant: Annotated[str, typer.Argument(help="Whose key: jobs and cached pages are this name's alone.")]
) -> None:
    """Print a new API key, this once, and add its hash to the file of keys. Counts at once; to revoke it, remove its line."""
    from service.api_keys import add_key

    path = loaded.settings.api_keys_file
    if path is None:
        raise SettingsError("there is no file to add a key to", "name one with --api-keys-file or MIDSENTENCE_API_KEYS_FILE")
    print(add_key(path, tenant))


@config_app.command("show")
@with_settings()
def config_show(loaded: LoadedSettings, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show every setting, its value, and where it comes from."""
    from service.config_command import show

    show(loaded, as_json=as_json)


if __name__ == "__main__":
    main()
