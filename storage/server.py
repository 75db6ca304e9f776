"""What kind of Redis this is, and whether its settings keep what it acknowledges (PROTOCOL.md 5)."""

from dataclasses import dataclass

from storage.errors import StorageError, StoreMisconfigured, StoreUnavailable
from storage.wire import Wire

#: Unlink, streams with explicit ids and scripts replicated by effect are all there since then.
_OLDEST = (7, 0)
#: What must be set, and why it matters.
_SETTINGS = {
    "appendonly": ("yes", "without an append-only file a restart loses every job"),
    "appendfsync": ("always", "with everysec a plain kill of Redis lost 334 of 1,432 acknowledged writes"),
    "maxmemory-policy": ("noeviction", "an evicting Redis deletes jobs without an error"),
    "no-appendfsync-on-rewrite": ("no", "else acknowledged writes are not on disk while the file is rewritten"),
}
#: What should be set: without it nothing acknowledged is lost, but service.
_ADVISED = {
    "save": ("", "a snapshot that fails makes Redis refuse every write"),
    "aof-load-truncated": ("yes", "a write that was cut off, and never acknowledged, keeps Redis from starting"),
}


@dataclass(frozen=True, slots=True)
class ServerInfo:
    name: str  #: "Redis" or "Valkey"
    version: str
    run_id: str
    role: str
    process_id: int
    used_memory: int
    maxmemory: int  #: 0: no limit
    aof_enabled: bool
    aof_last_write_ok: bool
    aof_rewriting: bool  #: or about to
    aof_last_rewrite_ok: bool  #: also before the first
    loading: bool


def server_info(wire: Wire) -> ServerInfo:
    lines = (line.partition(":") for line in str(wire.call("INFO")).splitlines())
    info = {name: value for name, colon, value in lines if colon}
    valkey = info.get("valkey_version")  # Valkey also says redis_version:7.2.4
    return ServerInfo(
        name="Valkey" if valkey else "Redis",
        version=valkey or info.get("redis_version", "0"),
        run_id=info.get("run_id", ""),
        role=info.get("role", ""),
        process_id=int(info.get("process_id", "0")),
        used_memory=int(info.get("used_memory", "0")),
        maxmemory=int(info.get("maxmemory", "0")),
        aof_enabled=info.get("aof_enabled") == "1",
        aof_last_write_ok=info.get("aof_last_write_status", "ok") == "ok",
        aof_rewriting="1" in (info.get("aof_rewrite_in_progress"), info.get("aof_rewrite_scheduled")),
        aof_last_rewrite_ok=info.get("aof_last_bgrewrite_status", "ok") == "ok",
        loading=info.get("loading", "0") != "0",
    )


def memory_use(wire: Wire) -> float:
    """Part of maxmemory in use; 0 without a limit."""
    lines = (line.partition(":") for line in str(wire.call("INFO", "memory")).splitlines())
    info = {name: value for name, _, value in lines}
    limit = int(info.get("maxmemory", "0"))
    return int(info.get("used_memory", "0")) / limit if limit else 0.0


def check_settings(wire: Wire, *, allow_weak: bool) -> list[str]:
    info = server_info(wire)
    wrong: list[str] = []
    warnings: list[str] = []
    if info.role != "master":
        wrong.append(f"this server is a {info.role or 'server of unknown role'}: use the URL of the master")
    if tuple(map(int, info.version.split(".")[:2])) < _OLDEST:
        wrong.append(f"{info.name} {info.version} is too old: 7.0 or later is needed")
    weak = _settings_problems(wire, info, warnings)
    if not allow_weak:
        wrong += weak
    else:
        warnings += [f"accepted by --allow-weak-durability: {problem}" for problem in weak]
    if not info.maxmemory:
        warnings.append("maxmemory is not set: a full machine kills Redis instead of refusing new jobs")
    if wrong:
        raise StoreMisconfigured("Redis is not set up to keep jobs: " + "; ".join(wrong), "fix redis.conf and restart Redis")
    return warnings


def _settings_problems(wire: Wire, info: ServerInfo, warnings: list[str]) -> list[str]:
    problems: list[str] = []
    for name, (wanted, why) in (_SETTINGS | _ADVISED).items():
        shown = wanted or "empty"
        try:
            reply = wire.call("CONFIG", "GET", name)
        except StoreUnavailable:
            raise
        except StorageError as error:  # forbidden by an ACL, or renamed by a managed service
            warnings.append(f"cannot read {name} ({error.message}): make sure that it is {shown}, {why}")
            if name == "appendonly" and not info.aof_enabled:
                problems.append(f"append-only file is off: set appendonly yes ({why})")
            continue
        if len(reply) != 2:
            warnings.append(f"this server has no setting {name}: make sure that it behaves as {shown}, {why}")
        elif reply[1] != wanted:
            found = problems if name in _SETTINGS else warnings
            found.append(f"{name} is {reply[1]}: set it to {shown} ({why})")
    return problems
