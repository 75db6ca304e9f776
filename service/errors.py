"""Errors of the processes around the engine. Each stops a command; the command line prints it and exits with 78 (EX_CONFIG).

ServiceError
├── SettingsError           a flag, variable or key is unknown, or a value is not allowed
├── AlreadyRunning          another process holds the lock of this data directory
├── RegistrationRefused     the store knows this engine id under another model, or on a living machine
├── DirectoryError          the data directory cannot be used (full, not ours, not writable)
├── LimitTooLow             the machine, or who started us, allows too little
├── PortInUse               another process listens where we are to listen
└── RedisError
    ├── RedisStartFailed    the embedded Redis ended while starting (full disk, damaged AOF)
    ├── RedisRefused        the server that answers is not the one this directory needs
    └── RedisNotRunning     nobody runs the embedded Redis, and this command does not start it

Stopped                     no error: SIGTERM arrived before there was anything to end in order
"""


class ServiceError(Exception):
    """Has a message for people and a ``hint`` that names the fix."""

    exit_code = 78  #: EX_CONFIG: starting again would not help

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class SettingsError(ServiceError):
    pass


class AlreadyRunning(ServiceError):
    pass


class RegistrationRefused(ServiceError):
    pass


class DirectoryError(ServiceError):
    pass


class LimitTooLow(ServiceError):
    pass


class PortInUse(ServiceError):
    pass


class RedisError(ServiceError):
    pass


class RedisStartFailed(RedisError):
    pass


class RedisRefused(RedisError):
    pass


class RedisNotRunning(RedisError):
    pass


class Stopped(Exception):
    pass
