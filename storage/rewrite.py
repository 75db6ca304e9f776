"""A new append-only file after purges: until then Redis has forgotten a job, and its file has not (PROTOCOL.md 9).

A script decides who asks, so that of any number of apis one does, and not too often. What was asked for counts once it is known to
have ended well: whoever asked may die before, and so may Redis. Then somebody asks again, when the time between two has passed.
"""

from dataclasses import dataclass

from storage.errors import StorageError
from storage.server import server_info
from storage.session import Session


@dataclass(frozen=True, slots=True)
class _Asked:
    purges: str  #: that the new file is without
    run_id: str  #: of the server that was asked: another one never heard of it


class FileRewrite:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._asked: _Asked | None = None

    def ask(self, interval: float) -> bool:
        """As ``JobStore.rewrite_file``."""
        if self._asked is not None and not self._settle(self._asked):
            return False
        word, _, *purges = self._session.run("rewrite", repr(float(interval)))
        if word != "OK":
            return False
        info = server_info(self._session.plain)
        if not info.aof_enabled or not self._begin():  # without one (--allow-weak-durability) Redis would make one now
            return False
        self._asked = _Asked(purges[0], info.run_id)
        return True

    def _begin(self) -> bool:
        """False while another rewrite is under way: it may have begun before the purge."""
        try:
            self._session.plain.call("BGREWRITEAOF")
        except StorageError as error:
            if "already in progress" in error.message:
                return False
            raise
        return True

    def _settle(self, asked: _Asked) -> bool:
        """Take note of how it ended. False while it has not."""
        info = server_info(self._session.plain)
        same = info.run_id == asked.run_id
        if same and info.aof_rewriting:
            return False
        if same and info.aof_last_rewrite_ok:
            self._session.run("rewritten", asked.purges)
        self._asked = None
        return True
