"""A second engine process beside the one that serves: everything is imported, the model mapped and proved, and it waits.

When the engine dies, the supervisor tells it how, and it takes the lock, registers and goes on: what a start takes longest for has
happened. It holds nothing durable until then, no lock and no port, so its own death costs nothing. One that waits has read
the code and the weights that were installed when it was started: after an orderly end the engine is started anew.
"""

import os
import signal
import subprocess
from collections.abc import Callable

from engine import pool_memory
from service.children import Child
from service.processes import describe_exit

SETTLED = 5.0  #: seconds that the engine serves before another is made ready beside it: its own jobs come first


class Standby:
    """Belongs to the supervisor's loop, and to one ``engine``."""

    def __init__(self, engine: Child, say: Callable[[str], None]) -> None:
        self._engine = engine
        self._say = say
        self._child = Child("standby", engine.command, engine.environment, engine.run_dir)
        self._turn: int | None = None  #: the end of a pipe to which is written how the engine died

    def tend(self, death_pipe: int, *, now: float, ready: bool) -> None:
        """Look after it: start it once the engine has settled, and again when it died."""
        if death := self._child.reap():
            self._forget_turn()
            if death.returncode == -signal.SIGKILL:
                self._engine.overlook_oom_kill()
            self._say(f"the engine in waiting died ({describe_exit(death.returncode)})")
        settled = ready and self._engine.running and now - self._engine.started >= SETTLED
        if settled and not self._child.running and now >= self._child.start_at:
            self._start(death_pipe)

    def _start(self, death_pipe: int) -> None:
        turn, self._turn = os.pipe2(os.O_CLOEXEC)
        tell = {"--turn-fd": turn}
        if self._engine.pid is not None and (memory := pool_memory.of_process(self._engine.pid)) is not None:
            tell["--memory-fd"] = memory
        try:
            self._child.start(death_pipe, tell=tell)
        finally:
            for descriptor in tell.values():
                os.close(descriptor)  # memory, too: it ends with the engines, and not with us

    def take_over(self) -> "subprocess.Popen[bytes] | None":
        """The process that is the engine from now on, told how the one before ended. None: an engine has to be started."""
        if self._turn is None or self._engine.ended_orderly:
            self.end()
            return None
        try:
            os.write(self._turn, f"{self._engine.last_exit}\n".encode())
        except BrokenPipeError:
            self.end()  # it is just dying
            return None
        self._forget_turn()
        return self._child.let_go()

    def end(self) -> None:
        """Without ceremony: it holds nothing."""
        self._forget_turn()
        if (process := self._child.let_go()) is not None:
            process.kill()
            process.wait()

    def _forget_turn(self) -> None:
        if self._turn is not None:
            os.close(self._turn)
            self._turn = None
