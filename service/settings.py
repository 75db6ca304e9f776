"""All settings: flags override ``MIDSENTENCE_*`` variables, which override the TOML file, which overrides the defaults.

``load_settings`` is the only reader of the environment and of the file. A ``Settings`` made by hand reads neither, so tests get
exactly what they say. Nothing unknown is ignored: a misspelt variable or key is an error that names the nearest one.
"""

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from service.errors import SettingsError

PREFIX = "MIDSENTENCE_"
CONFIG_FILE_NAME = "midsentence.toml"

#: Variables with our prefix that are no settings: where the file is, where the client commands find the server
#: and with which key, test switches.
OTHER_VARIABLES = frozenset(
    {
        "MIDSENTENCE_CONFIG",
        "MIDSENTENCE_URL",
        "MIDSENTENCE_API_KEY",
        "MIDSENTENCE_TESTING",
        "MIDSENTENCE_FAILPOINTS",
        "MIDSENTENCE_FAILPOINT_LOG",
    }
)

#: Where a Redis URL can hold one: before the last @, and in the query, where redis-py takes it too.
_USER, _QUERY = re.compile(r"^(\w+://)?.*@", re.DOTALL), re.compile(r"(?<=[?&]password=)[^&]*")
MIB = 1 << 20


def _field(group: str, default: Any, description: str, **bounds: Any) -> Any:
    """A setting, with pydantic's own signature; ``group`` is its heading in ``--help``, ``config show`` and the docs."""
    return Field(default=default, description=description, json_schema_extra={"group": group}, **bounds)


class Settings(BaseModel):
    """Frozen and checked at construction. Times in seconds, sizes in bytes unless the name says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    data_dir: Path = _field(
        "Place", Path("midsentence-data"), "Directory of everything durable: pool file, store mark, embedded Redis, locks."
    )
    redis_url: str | None = _field(
        "Place", None, "Redis or Valkey to use (redis://, rediss:// or unix://). Unset: the embedded one in the data directory."
    )
    model: str = _field("Place", "demo", "'demo' (SmolLM2-135M-Instruct), a folder, or a Hugging Face id.", min_length=1)
    host: str = _field("Place", "127.0.0.1", "Address to listen on (API, and the engine's metrics and health).", min_length=1)
    port: int = _field("Place", 8710, "Port of the API.", ge=1, le=65535)
    engine_port: int = _field("Place", 8711, "Port of the engine's metrics and health; 0 turns it off.", ge=0, le=65535)

    api_keys_file: Path | None = _field(
        "Access",
        None,
        "File of API keys, one line each; `midsentence keys add TENANT` makes it. Unset: nobody is asked for a key.",
    )
    allow_anonymous: bool = _field(
        "Access", False, "Serve other machines without API keys: whoever reaches the port may do everything."
    )
    max_body_bytes: int = _field("Access", 8 * MIB, "Largest request body.", ge=1024, le=1 << 30)
    max_prompt_chars: int = _field(
        "Access", 1 << 20, "Longest prompt in characters; a longer one is refused before it is tokenised.", ge=1, le=1 << 30
    )
    max_file_bytes: int = _field("Access", 200 * MIB, "Largest file that may be uploaded, for batches.", ge=1024, le=1 << 30)
    max_files_bytes: int = _field(
        "Access", 1 << 30, "Bytes of all uploaded files together; they are kept in Redis's memory. More are refused (429).", ge=1024
    )
    tenant_queue_limit: int | None = _field(
        "Access", None, "Queued jobs of one tenant above this are refused (429). Unset: only queue_limit holds.", ge=1
    )
    tenant_streams: int = _field(
        "Access", 1000, "Open streams and waiting completions of one tenant in each API; more are refused (429).", ge=1
    )
    tenant_requests_per_minute: int | None = _field(
        "Access", None, "Requests for jobs of one tenant in a minute, in each API; more are refused (429). Unset: any number.", ge=1
    )
    tenant_tokens_per_minute: int | None = _field(
        "Access", None, "Tokens that these may ask for, prompts and longest answers, in a minute. Unset: any number.", ge=1
    )

    page_size: int = _field(
        "Pages", 16, "Token slots per KV page; on CUDA 256 or a multiple of it, and 256 if unset.", ge=1, le=1024
    )
    device_pages: int | None = _field(
        "Pages",
        None,
        "Pages of the device pool. Unset: a quarter of the memory, at most 1 GiB; on CUDA what the model leaves.",
        ge=2,
    )
    host_pages: int | None = _field(
        "Pages",
        None,
        "Pages of the memory-mapped pool file. Unset: 2 for each device page, at most a quarter of the free disk. 0: no file, no"
        " checkpoints; after a crash or a preemption jobs lose no token, but recompute all of them.",
        ge=0,
    )
    durability: Literal["process", "machine"] = _field(
        "Pages", "process", "What KV pages survive: the death of our processes, or also that of the machine (fdatasync per page)."
    )
    eviction: Literal["arc", "lru", "fifo"] = _field(
        "Pages", "arc", "Which cached page goes first, in both pools: arc keeps what is used often, lru what was used last."
    )
    preemption: Literal["auto", "swap", "replay"] = _field(
        "Pages", "auto", "When pages run out: copy a job's pages out, or drop and recompute them; auto takes what costs less."
    )

    prefill_chunk: int = _field("Engine", 256, "Prompt tokens per call; a multiple of the page size.", ge=1, le=16384)
    max_running: int = _field("Engine", 32, "Sequences on the device at once.", ge=1, le=4096)
    max_step_tokens: int = _field("Engine", 512, "Prompt tokens computed in one step; at least one chunk.", ge=1, le=65536)
    max_step_rows: int = _field("Engine", 512, "Generated tokens (new or replayed) computed in one step.", ge=1, le=4096)
    max_context: int | None = _field("Engine", None, "Longest prompt plus answer, in tokens. Unset: the model's own.", ge=2)
    threads: int | None = _field("Engine", None, "Threads for arithmetic. Unset: one per physical core.", ge=1, le=1024)
    device: str = _field("Engine", "cpu", "Where models run: cpu, cuda or cuda:N.", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    weights: Literal["fp32", "bf16", "int8"] = _field(
        "Engine",
        "fp32",
        "Number format of the weights on the CPU: bf16 and int8 are smaller and faster, and change the text; exact all the same.",
    )
    kv_dtype: Literal["float32", "bfloat16", "float16"] = _field(
        "Engine",
        "float32",
        "Number format of KV pages; on CUDA also of weights and arithmetic: bfloat16 (if unset) or float16.",
    )
    exactness: Literal["on", "off"] = _field(
        "Engine", "on", "'on': a restored or replayed job has the bits of an uninterrupted one. 'off': faster, no such promise."
    )
    standby: Literal["on", "off"] = _field(
        "Engine",
        "on",
        "'on': `serve` keeps a second engine process waiting, its model mapped, that takes over at once when the engine dies.",
    )
    step_timeout_seconds: float = _field("Engine", 300.0, "A step longer than this counts as a crash of the engine.", ge=1)

    queue_limit: int = _field("Jobs", 10_000, "Queued jobs above this are refused (429).", ge=1)
    batch_window: int = _field(
        "Jobs", 256, "Lines of a batch that are queued or running at once; the rest waits in its file.", ge=1, le=10_000
    )
    retention_seconds: float = _field(
        "Jobs", 7 * 86_400.0, "How long finished jobs are kept, and host pages that nobody uses.", ge=1
    )
    lease_seconds: float = _field("Jobs", 10.0, "An engine whose beat stands still for this long is dead.", ge=1, le=3600)
    allow_weak_durability: bool = _field(
        "Jobs", False, "Accept a Redis that may lose acknowledged writes (it is refused otherwise)."
    )
    drain: Literal["stay", "handover"] = _field(
        "Jobs",
        "stay",
        "At SIGTERM jobs go back to the queue: 'stay' keeps them for this engine's return (30 s), 'handover' does not.",
    )
    drain_timeout_seconds: float = _field("Jobs", 20.0, "Time for an orderly end before processes are killed.", ge=0, le=3600)

    log_level: Literal["debug", "info", "warning", "error"] = _field("Logs", "info", "Least important level that is logged.")
    log_format: Literal["auto", "json", "console"] = _field(
        "Logs", "auto", "'auto': text on a terminal, JSON lines elsewhere. Logs go to stderr."
    )

    @field_validator("data_dir", "api_keys_file")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is None:
            return None
        if "\0" in str(value):
            raise ValueError("must not hold a null character")
        try:
            return Path(os.path.abspath(value.expanduser()))
        except RuntimeError as error:  # ~NAME of nobody here
            raise ValueError(f"{error}") from None

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            parts = urlsplit(value)
            _ = parts.port  # refused here, not at the first connection
        except ValueError:
            raise ValueError("is not a URL (in a password, / ? # @ : are %2F %3F %23 %40 %3A)") from None  # its words may quote one
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ValueError("must begin with redis://, rediss:// or unix://")
        return value

    @model_validator(mode="before")
    @classmethod
    def _suit_the_device(cls, values: dict[str, Any]) -> dict[str, Any]:
        if str(values.get("device", "")).startswith("cuda"):
            return {"kv_dtype": "bfloat16", "weights": "bf16", "page_size": 256, **values}
        return values

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.prefill_chunk % self.page_size:
            raise ValueError(f"prefill_chunk ({self.prefill_chunk}) must be a multiple of page_size ({self.page_size})")
        if self.device != "cpu" and self.page_size % 256:  # engine.cuda_device.PAGE_STEP, which would load torch
            raise ValueError(
                f"page_size ({self.page_size}) must be a multiple of 256 on {self.device}: its attention reads no other"
            )
        if self.device != "cpu" and self.weights != "bf16":
            raise ValueError(
                f"weights ({self.weights}) are a choice of the cpu: on {self.device} they have kv_dtype ({self.kv_dtype})"
            )
        if self.max_step_tokens < self.prefill_chunk:
            raise ValueError(f"max_step_tokens ({self.max_step_tokens}) must hold one prefill_chunk ({self.prefill_chunk})")
        if self.engine_port == self.port:
            raise ValueError(f"engine_port and port are both {self.port}")
        if not (is_loopback(self.host) or self.api_keys_file or self.allow_anonymous):
            raise ValueError(
                f"host ({self.host}) serves other machines, and nobody would be asked for a key: set api_keys_file "
                "(`midsentence keys add TENANT` makes it), or allow_anonymous where only friends reach the port"
            )
        return self

    @property
    def run_dir(self) -> Path:
        """Locks, pid files and the socket's path: nothing here outlives its process in meaning."""
        return self.data_dir / "run"

    @property
    def client_url(self) -> str:
        """Where a client on this machine reaches the API."""
        return self._local_url(self.port)

    @property
    def engine_url(self) -> str | None:
        """Where the engine's metrics and health are on this machine; None when they are turned off."""
        return self._local_url(self.engine_port) if self.engine_port else None

    def _local_url(self, port: int) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def environment(self) -> dict[str, str]:
        """These settings as variables for a child process. Not as flags: a Redis password must not show in the process list."""
        values = {variable(name): as_text(value) for name, value in self if value is not None}
        return values | {"MIDSENTENCE_CONFIG": os.devnull}  # a file that changed meanwhile must not split supervisor and children


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    settings: Settings
    sources: dict[str, str]  #: setting -> the flag, variable or file that set it; absent for defaults
    config_file: Path | None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. Any other name than localhost is taken for a way in."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def variable(name: str) -> str:
    return PREFIX + name.upper()


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def group_of(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    return str(extra["group"]) if isinstance(extra, dict) else ""


def load_settings(
    flags: Mapping[str, object] | None = None, *, config: Path | None = None, environ: Mapping[str, str] | None = None
) -> LoadedSettings:
    """Read everything once. ``flags`` by setting name, None meaning "not given". Raises SettingsError."""
    environ = os.environ if environ is None else environ
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    from_variables = _read_environment(environ)
    if config is None and environ.get("MIDSENTENCE_CONFIG"):
        config = Path(environ["MIDSENTENCE_CONFIG"])
    config_file, from_file = _read_file(config, given | from_variables)
    sources = {name: f"{name} in {config_file}" for name in from_file}
    sources |= {name: variable(name) for name in from_variables}
    sources |= {name: flag(name) for name in given}
    try:
        settings = Settings.model_validate({**from_file, **from_variables, **given})
    except ValidationError as error:
        raise _explain(error, sources) from None
    return LoadedSettings(settings, sources, config_file)


def _read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    known = {variable(name): name for name in Settings.model_fields}
    values: dict[str, str] = {}
    for key in sorted(environ):
        if not key.startswith(PREFIX) or key in OTHER_VARIABLES:
            continue
        if key not in known:
            raise SettingsError(f"unknown variable {key}", _nearest(key, [*known, *OTHER_VARIABLES]))
        if environ[key] != "":  # compose files and unit files write "not set" as an empty value
            values[known[key]] = environ[key]
    return values


def _read_file(config: Path | None, others: Mapping[str, object]) -> tuple[Path | None, dict[str, Any]]:
    directory = Path(str(others.get("data_dir", Settings.model_fields["data_dir"].default)))
    path = directory / CONFIG_FILE_NAME if config is None else config
    try:
        path = path.expanduser()
        if config is None and not path.exists():
            return None, {}
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:  # not UTF-8, a null character in the name, ~NAME of nobody here
        raise SettingsError(f"cannot read the configuration file {path}: {error}") from error
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits are no TOMLDecodeError
        raise SettingsError(f"the configuration file {path} is not valid TOML: {error}") from error
    for key in values:
        if key not in Settings.model_fields:
            raise SettingsError(f"unknown key {key!r} in {path}", _nearest(key, list(Settings.model_fields)))
    if config is None and "data_dir" in values:
        raise SettingsError(
            f"data_dir cannot be set in {path}, which was found through it", "use --data-dir, or name the file with --config"
        )
    return path, values


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else "`midsentence config show` lists all settings"


def _explain(error: ValidationError, sources: Mapping[str, str]) -> SettingsError:
    """One line per problem, each naming the flag, variable or key as the user wrote it."""
    lines = []
    for problem in error.errors(include_url=False):
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:
            lines.append(message)
            continue
        name = str(problem["loc"][0])
        shown = redacted(name, problem.get("input"))
        lines.append(f"{sources.get(name, name)}: {message[:1].lower()}{message[1:]}, got {shown!r}")
    return SettingsError("; ".join(lines))


def redacted(name: str, value: object) -> str:
    """A value as it may be shown: without the passwords of a URL, which may be none (so it is not taken apart here)."""
    text = as_text(value)
    return _QUERY.sub("***", _USER.sub(r"\1***@", text)) if name == "redis_url" else text


def as_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
