"""Errors of durable state.

StorageError
├── StoreUnavailable        Redis did not answer: the outcome is unknown, send the same call again
├── StoreFull               Redis refused for want of memory: a pause, not a failure
├── StoreMisconfigured      Redis runs with settings that would lose acknowledged writes
├── WrongStore              this is not the store we belong to, it lost commits, or another version's format
├── EngineDead              this incarnation was declared dead: drop everything, register anew
├── PoolLocked              another process holds the pool file
└── PoolError               the pool file cannot be made or read
"""


class StorageError(Exception):
    """Has a message for people and a ``hint`` that names the fix."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class StoreUnavailable(StorageError):
    pass


class StoreFull(StorageError):
    pass


class StoreMisconfigured(StorageError):
    pass


class WrongStore(StorageError):
    pass


class EngineDead(StorageError):
    pass


class PoolLocked(StorageError):
    pass


class PoolError(StorageError, OSError):
    """Also an OSError, as any failed read or write is: whoever moves pages needs to know no more than that."""
