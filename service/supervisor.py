"""``midsentence serve``: starts the embedded Redis, the engine and the api; starts again what dies; ends all in order.

SIGUSR2 replaces the api by a new one, of the code that is installed by then: no connection is refused and no job notices.

One thread, one loop: it wakes for signals (and so for deaths of children) and twice a second. It holds no state worth keeping:
killed, it takes engine and api along by the death pipe, leaves Redis running, and the next one attaches to it.
"""

import contextlib
import functools
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from service import logs
from service.child_ready import ReadyWatch
from service.children import Backoff, Child, Death, LastExit, classify
from service.errors import DirectoryError, RedisNotRunning, ServiceError, SettingsError
from service.handover import Handover, Progress
from service.listening import ApiPort
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
from service.settings import MIB, Settings, is_loopback
from service.sizing import free_disk
from service.standby import Standby

LOCK_WAIT = 30.0  #: seconds to wait for the lock of a child: the killed one before it may still be unmapping its pool
KILL_ENGINE = signal.SIGUSR1  #: from the api, with --demo-controls
_TICK = 0.5
_STARTING_TICK = 0.02
_SAY_WHY_AFTER = 15.0
_SECOND_THOUGHT = 0.3
_LONGEST_REDIS_PAUSE = 5.0  #: a try costs nothing, and a disk may have room again at any time

Say = Callable[[str], None]
MakeChildren = Callable[[Settings, ApiPort], Sequence[Child]]


def serve(settings: Settings, *, demo_controls: bool = False) -> int:
    """Run everything until SIGTERM or SIGINT. The exit code. Raises ServiceError where it cannot even begin."""
    if demo_controls and not is_loopback(settings.host):
        raise SettingsError(f"--demo-controls: host ({settings.host}) lets others kill the engine", "leave one of the two out")
    log = logs.get_logger("supervisor")
    children = functools.partial(engine_and_api, kill_button=demo_controls)
    return Supervisor(settings, children=children, say=log.info, demo_controls=demo_controls).run()


def ask_to_kill_engine() -> None:
    """In the api, a child of a supervisor that shows a demo. Its parent knows the engine as its child: no pid file could."""
    os.kill(os.getppid(), KILL_ENGINE)


def engine_and_api(settings: Settings, port: ApiPort, *, kill_button: bool = False) -> Sequence[Child]:
    environment, run_dir = child_environment(settings.environment()), settings.run_dir
    engine = python_command("engine", "--lock-wait", f"{LOCK_WAIT:g}")
    has_standby = settings.standby == "on"
    api = python_command("api", "--listen-fd", str(port.fd), *(["--kill-button"] if kill_button else []))
    return (
        Child("engine", engine, environment, run_dir, tell_last_exit=True, has_standby=has_standby),
        Child("api", api, environment, run_dir, inherits=port.inherited),
    )


class Supervisor:
    """``children`` is called once Redis is there, with settings that carry its URL."""

    def __init__(self, settings: Settings, *, children: MakeChildren, say: Say, demo_controls: bool = False) -> None:
        """``demo_controls``: SIGUSR1 kills the engine."""
        self._demo_controls = demo_controls
        self._kill_asked = False
        self._settings = settings
        self._make_children = children
        self._say = say
        self._children: list[Child] = []
        self._standby: Standby | None = None
        self._retired: list[Child] = []  #: apis that were replaced and still answer what they were asked
        self._handover: Handover | None = None
        self._replace_asked = False
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
        port = ApiPort(self._settings, wait=LOCK_WAIT)
        with lock.acquire(), port, _death_pipe() as death_pipe, self._signals() as wakeup:
            write_pid_file(run_dir / "supervisor.pid", os.getpid())
            try:
                self._loop(wakeup, death_pipe, port)
            finally:
                self._ready.stop()
                port.close()  # the api alone keeps it now: who connects after its end is refused, not left to wait for us
                self._end(wakeup)
                (run_dir / "supervisor.pid").unlink(missing_ok=True)
        if self._final_message:
            self._say(self._final_message)
        return self._exit

    # running -------------------------------------------------------------------------------------------------------

    def _loop(self, wakeup: int, death_pipe: int, port: ApiPort) -> None:
        while not self._stop_requests and self._exit is Exit.OK:
            self._tend_redis()
            if not self._children and (self._redis is None or self._redis_up_since is not None):
                self._children = list(self._make_children(self._settings_for_children(), port))
                self._standby = next((Standby(child, self._say) for child in self._children if child.has_standby), None)
                self._ready.start()
            self._tend_handover(death_pipe)
            self._kill_engine_if_asked()
            for child in self._children:
                if death := child.reap():
                    self._mourn(child, death)
            self._retired = [child for child in self._retired if child.running and child.reap() is None]
            if self._exit is Exit.OK and not self._stop_requests:
                self._start_due(death_pipe)
                if self._standby is not None:
                    self._standby.tend(death_pipe, now=time.monotonic(), ready=self._ready.ready)
            self._sleep(wakeup)

    def _tend_handover(self, death_pipe: int) -> None:
        if self._handover is None:
            if self._replace_asked:
                self._replace_asked = False
                self._begin_handover(death_pipe)
            return
        new, old = self._handover.new, self._handover.old
        progress = self._handover.look()
        if progress is Progress.WAITING and old.running:
            return
        death = self._handover.death
        self._handover.close()
        self._handover = None
        if progress is Progress.FAILED:
            how = "is not ready and was given up" if death is None else f"died ({death.refusal or describe_exit(death.returncode)})"
            self._say(f"the new {new.name} {how}; the old one goes on")
            new.signal(signal.SIGKILL)
            self._retired.append(new)
            old.name_pid()
            return
        self._children[self._children.index(old)] = new
        old.signal(signal.SIGUSR2)
        self._retired.append(old)
        self._say(f"{new.name} replaced: process {new.pid} serves")

    def _begin_handover(self, death_pipe: int) -> None:
        replaceable = [child for child in self._children if child.inherits and child.running]
        if not replaceable:
            self._say("no api runs just now: there is nothing to replace")
            return
        self._handover = Handover(replaceable[0], death_pipe)

    def _settings_for_children(self) -> Settings:
        return self._settings if self._redis is None else self._settings.model_copy(update={"redis_url": self._redis.url})

    def _kill_engine_if_asked(self) -> None:
        asked, self._kill_asked = self._kill_asked, False
        for child in self._children:
            if asked and child.name == "engine":
                self._say("the dashboard's button kills the engine")
                child.signal(signal.SIGKILL)

    def _mourn(self, child: Child, death: Death) -> None:
        how = describe_exit(death.returncode)
        if self._handover is not None and child is self._handover.old:
            self._say(f"{child.name} died ({how}) while it was replaced")  # the next look makes the new one its heir
            return
        if death.final:
            self._exit = Exit.CONFIG
            self._final_message = f"{child.name} cannot run: {death.refusal or f'{how}, see its message above'}"
            return
        self._ready.look_again()
        when = f"in {death.pause:.1f} s" if death.pause else "now"
        self._say(f"{child.name} {'ended' if death.returncode == 0 else 'died'} ({how}), starting again {when}")

    def _start_due(self, death_pipe: int) -> None:
        for child in self._children:
            replaced = self._handover is not None and child is self._handover.old
            if not child.running and not replaced and time.monotonic() >= child.start_at:
                heir = self._standby.take_over() if child.has_standby and self._standby is not None else None
                if heir is None:
                    child.start(death_pipe)
                else:
                    child.adopt(heir)

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
        awaited = [wakeup] if self._handover is None else [wakeup, self._handover.ready_pipe]
        if wakeup in select.select(awaited, [], [], max(0.0, pause))[0]:
            os.read(wakeup, 4096)

    # ending --------------------------------------------------------------------------------------------------------

    def _end(self, wakeup: int) -> None:
        """SIGTERM to engine and api, then Redis. A second signal, or the time-out, turns patience into SIGKILL."""
        if self._standby is not None:
            self._standby.end()
        alive = [child for child in (*self._children, *self._retired) if child.running]
        if self._handover is not None:
            alive.append(self._handover.new)
            self._handover.close()
        for child in alive:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + self._settings.drain_timeout_seconds
        while alive := [child for child in alive if child.reap() is None]:
            left = deadline - time.monotonic()
            if left <= 0 or self._stop_requests > 1:
                break
            if select.select([wakeup], [], [], min(left, _TICK))[0]:
                os.read(wakeup, 4096)
        for child in alive:
            self._say(f"{child.name} did not end in time: killed (its jobs go on at the next start)")
            child.signal(signal.SIGKILL)
            if child.process is not None:
                child.process.wait()
            child.reap()
        if self._redis is not None and (self._stop_requests > 1 or not self._redis.stop()):
            self._redis.kill()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[int]:
        """A descriptor that becomes readable at each signal; SIGCHLD among them, so that a death wakes the loop."""
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

        def stop(_number: int, _frame: object) -> None:
            # A wrapper may pass on one Ctrl-C twice (timeout, init programs): a person's second thought takes longer.
            if not self._stop_requests or time.monotonic() - self._stop_asked > _SECOND_THOUGHT:
                self._stop_requests += 1
                self._stop_asked = time.monotonic()

        def replace_api(_number: int, _frame: object) -> None:
            self._replace_asked = True

        def kill(_number: int, _frame: object) -> None:
            self._kill_asked = True

        handlers: dict[signal.Signals, Callable[[int, object], None]]
        handlers = dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), stop)
        handlers |= {signal.SIGUSR2: replace_api, signal.SIGCHLD: lambda *_: None}
        if self._demo_controls:
            handlers[KILL_ENGINE] = kill
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
