"""``midsentence serve``: starts the embedded Redis, the engine and the api; starts again what dies; ends all in order.

One thread, one loop: it wakes for signals (and so for deaths of children) and twice a second. It holds no state worth keeping:
killed, it takes engine and api along by the death pipe, leaves Redis running, and the next one attaches to it.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from service import logs
from service.child_ready import ReadyWatch
from service.children import Backoff, Child, Death, LastExit, classify
from service.errors import DirectoryError, RedisNotRunning, ServiceError
from service.processes import (
    Exit,
    FileLock,
    child_environment,
    describe_exit,
    prepare_directory,
    python_command,
    write_pid_file,
)
from service.redis_server import MIN_FREE_DISK, EmbeddedRedis
from service.settings import MIB, Settings
from service.sizing import free_disk

LOCK_WAIT = "30"  #: seconds a child waits for its lock: the killed one before it may still be unmapping its pool
_TICK = 0.5
_STARTING_TICK = 0.02
_SAY_WHY_AFTER = 15.0
_SECOND_THOUGHT = 0.3
_LONGEST_REDIS_PAUSE = 5.0  #: a try costs nothing, and a disk may have room again at any time

Say = Callable[[str], None]
MakeChildren = Callable[[Settings], Sequence[Child]]


def serve(settings: Settings) -> int:
    """Run everything until SIGTERM or SIGINT. The exit code. Raises ServiceError where it cannot even begin."""
    log = logs.get_logger("supervisor")
    supervisor = Supervisor(settings, children=engine_and_api, say=log.info)
    return supervisor.run()


def engine_and_api(settings: Settings) -> Sequence[Child]:
    environment = child_environment(settings.environment())
    return (
        Child("engine", python_command("engine", "--lock-wait", LOCK_WAIT), environment, settings.run_dir, tell_last_exit=True),
        Child("api", python_command("api", "--lock-wait", LOCK_WAIT), environment, settings.run_dir),
    )


class Supervisor:
    """``children`` is called once Redis is there, with settings that carry its URL."""

    def __init__(self, settings: Settings, *, children: MakeChildren, say: Say) -> None:
        self._settings = settings
        self._make_children = children
        self._say = say
        self._children: Sequence[Child] = ()
        self._redis = EmbeddedRedis(settings.data_dir) if settings.redis_url is None else None
        self._redis_backoff = Backoff()
        self._redis_up_since: float | None = None
        self._redis_try_at = 0.0
        self._said_waiting = time.monotonic()
        self._stop_requests = 0
        self._stop_asked = 0.0
        self._exit = Exit.OK
        self._final_message = ""
        self._ready = ReadyWatch(settings.client_url, say, engine_url=settings.engine_url)

    def run(self) -> int:
        check_directory(self._settings)
        run_dir = self._settings.run_dir
        lock = FileLock(run_dir / "supervisor.lock", f"a supervisor of {self._settings.data_dir}")
        with lock.acquire(), _death_pipe() as death_pipe, self._signals() as wakeup:
            write_pid_file(run_dir / "supervisor.pid", os.getpid())
            try:
                self._loop(wakeup, death_pipe)
            finally:
                self._ready.stop()
                self._end(wakeup)
                (run_dir / "supervisor.pid").unlink(missing_ok=True)
        if self._final_message:
            self._say(self._final_message)
        return self._exit

    # running -------------------------------------------------------------------------------------------------------

    def _loop(self, wakeup: int, death_pipe: int) -> None:
        while not self._stop_requests and self._exit is Exit.OK:
            self._tend_redis()
            if not self._children and (self._redis is None or self._redis_up_since is not None):
                self._children = self._make_children(self._settings_for_children())
                self._ready.start()
            for child in self._children:
                if death := child.reap():
                    self._mourn(child, death)
            if self._exit is Exit.OK and not self._stop_requests:
                self._start_due(death_pipe)
            self._sleep(wakeup)

    def _settings_for_children(self) -> Settings:
        return self._settings if self._redis is None else self._settings.model_copy(update={"redis_url": self._redis.url})

    def _mourn(self, child: Child, death: Death) -> None:
        how = describe_exit(death.returncode)
        if death.final:
            self._exit = Exit.CONFIG
            self._final_message = f"{child.name} cannot run: {death.refusal or f'{how}, see its message above'}"
            return
        self._ready.look_again()
        when = f"in {death.pause:.1f} s" if death.pause else "now"
        self._say(f"{child.name} {'ended' if death.returncode == 0 else 'died'} ({how}), starting again {when}")

    def _start_due(self, death_pipe: int) -> None:
        for child in self._children:
            if not child.running and time.monotonic() >= child.start_at:
                child.start(death_pipe)

    def _tend_redis(self) -> None:
        """Start, attach or start again. Engine and api pause meanwhile and go on by themselves."""
        if self._redis is None or (self._redis_up_since is not None and self._redis.alive()):
            return
        now = time.monotonic()
        if self._redis_up_since is not None:
            code = self._redis.returncode
            kind = LastExit.CRASH if code is None else classify(code, oom_killed=False)
            pause = self._redis_backoff.next_pause(now - self._redis_up_since, kind)
            self._say(f"redis died ({'unknown' if code is None else describe_exit(code)}), starting again")
            self._redis_up_since, self._redis_try_at, self._said_waiting = None, now + pause, now
            self._ready.look_again()
        if now < self._redis_try_at:
            return
        try:
            self._redis.start_or_attach(timeout=0)
            self._redis_up_since = time.monotonic()
        except RedisNotRunning as waiting:
            self._wait_for_redis(waiting)
        except ServiceError as error:
            if not self._children:
                raise  # at the start nothing is lost by refusing
            pause = min(self._redis_backoff.next_pause(0.0, LastExit.CRASH), _LONGEST_REDIS_PAUSE)
            self._redis_try_at = time.monotonic() + pause
            self._say(f"redis does not start, trying again in {pause:.1f} s: {error}")

    def _wait_for_redis(self, waiting: RedisNotRunning) -> None:
        """It is there but loading, stopped or ending: look again soon, and say so when it takes long."""
        now = time.monotonic()
        self._redis_try_at = now + _STARTING_TICK
        if now - self._said_waiting >= _SAY_WHY_AFTER:
            self._said_waiting = now
            self._say(f"still waiting: {waiting.message}")

    def _sleep(self, wakeup: int) -> None:
        """Until a signal arrives or something is due."""
        due = [child.start_at for child in self._children if not child.running]
        if self._redis is not None and self._redis_up_since is None:
            due.append(self._redis_try_at)
        pause = min([_TICK, *(at - time.monotonic() for at in due)])
        if select.select([wakeup], [], [], max(0.0, pause))[0]:
            os.read(wakeup, 4096)

    # ending --------------------------------------------------------------------------------------------------------

    def _end(self, wakeup: int) -> None:
        """SIGTERM to engine and api, then Redis. A second signal, or the time-out, turns patience into SIGKILL."""
        alive = [child for child in self._children if child.running]
        for child in alive:
            self._signal(child, signal.SIGTERM)
        deadline = time.monotonic() + self._settings.drain_timeout_seconds
        while alive := [child for child in alive if child.reap() is None]:
            left = deadline - time.monotonic()
            if left <= 0 or self._stop_requests > 1:
                break
            if select.select([wakeup], [], [], min(left, _TICK))[0]:
                os.read(wakeup, 4096)
        for child in alive:
            self._say(f"{child.name} did not end in time: killed (its jobs go on at the next start)")
            self._signal(child, signal.SIGKILL)
            if child.process is not None:
                child.process.wait()
            child.reap()
        if self._redis is not None and (self._stop_requests > 1 or not self._redis.stop()):
            self._redis.kill()

    def _signal(self, child: Child, number: signal.Signals) -> None:
        if child.process is not None:
            child.process.send_signal(number)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[int]:
        """A descriptor that becomes readable at each signal; SIGCHLD among them, so that a death wakes the loop."""
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

        def stop(_number: int, _frame: object) -> None:
            # A wrapper may pass on one Ctrl-C twice (timeout, init programs): a person's second thought takes longer.
            if not self._stop_requests or time.monotonic() - self._stop_asked > _SECOND_THOUGHT:
                self._stop_requests += 1
                self._stop_asked = time.monotonic()

        handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: stop, signal.SIGCHLD: lambda *_: None}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        before_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(before_fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(reader)
            os.close(writer)


def check_directory(settings: Settings) -> None:
    """Make the data directory, and refuse a full disk before anything is half started."""
    prepare_directory(settings.data_dir)
    prepare_directory(settings.run_dir)
    free = free_disk(settings.data_dir)
    if free < MIN_FREE_DISK:
        raise DirectoryError(
            f"only {free // MIB} MiB are free on the disk of {settings.data_dir}",
            f"free at least {MIN_FREE_DISK // MIB} MiB, or choose another --data-dir",
        )


@contextlib.contextmanager
def _death_pipe() -> Iterator[int]:
    """The read end, for children. We alone hold the write end, and never write: its end of file is our death."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(reader)
        os.close(writer)
