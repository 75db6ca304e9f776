"""What a check of durable state finds: one vocabulary for Redis, pool file and data directory."""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    NOTE = "note"  #: nothing is wrong
    REPAIRABLE = "repairable"  #: costs time or space, never a token
    DAMAGE = "damage"  #: a promise is broken, or could be


class Check(StrEnum):
    """What was looked at when something was found: scripts select by it."""

    STORE = "store"  #: which store this is and how far it came, against the marks of the directory
    LOG = "log"  #: numbering and chain hash of a job's log
    JOB = "job"  #: a job's record and where it stands
    BATCH = "batch"  #: a file's or a batch's record, where it stands, and its counts against its jobs
    KEY = "key"  #: keys of Redis: kind, time to live, what they name
    ENGINE = "engine"  #: records of engines
    POOL = "pool"  #: the pool file and the pool's table
    PAGE = "page"  #: bytes of a page; ``where`` is "host page N"
    FILE = "file"  #: what else lies in the data directory, and who may read it


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    check: Check
    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.severity} {self.where}: {self.what}"
