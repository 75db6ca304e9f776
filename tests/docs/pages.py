"""Pages that are made from the code: ``python -m tests.docs.pages`` writes them into ``docs/``.

``test_pages.py`` fails where one is not up to date.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, get_args, get_origin

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from pydantic.fields import FieldInfo

from service.metrics import PREFIX, ApiMetrics, EngineMetrics
from service.settings import Settings, as_text, flag, group_of, variable

DOCS = Path(__file__).parents[2] / "docs"
_MADE = "Made by `python -m tests.docs.pages`."

METRICS_HEAD = f"""# Metrics

`GET /metrics` on the API's port (8710) and on the engine's (8711), in Prometheus' text format; with API keys, either needs one.
Names are vLLM's suffixes under our prefix, so that its dashboards port. No label holds a job id, a request id or text. Ratios are
left to the query: `deploy/prometheus/rules.yml` has those that are wanted most. {_MADE}
"""
CONFIGURATION_HEAD = f"""# Configuration

Each setting is a flag, a variable or a key of a TOML file, in this order; unknown names are refused with the nearest known one. The
file is `midsentence.toml` in the data directory, or what `--config` or `MIDSENTENCE_CONFIG` names. `midsentence config show` lists
every value and where it comes from. Times are in seconds, sizes in bytes, unless the name says otherwise. {_MADE}
"""
SETTINGS_HEAD = ("| setting | flag, variable | values | default | meaning |", "| --- | --- | --- | --- | --- |")
OTHER_VARIABLES = """
## Other variables

| variable | meaning |
| --- | --- |
| `MIDSENTENCE_CONFIG` | the TOML file |
| `MIDSENTENCE_URL`, `MIDSENTENCE_API_KEY` | where the client commands (`submit`, `jobs`) find the server, and their key |
| `MIDSENTENCE_TESTING` | for tests: allows the next two |
| `MIDSENTENCE_FAILPOINTS`, `MIDSENTENCE_FAILPOINT_LOG` | faults at named points, and where they are written down |
| `OTEL_EXPORTER_OTLP_ENDPOINT` and the other `OTEL_*` | traces: [operations.md](operations.md#traces) |
| `XDG_CACHE_HOME`, `HF_HOME` | compiled kernels and converted weights (`midsentence/`); downloads of the Hugging Face hub |
| `LISTEN_FDS`, `LISTEN_PID` | set by systemd where it hands down the API's socket |
"""


def metric_names() -> Mapping[str, MetricWrapperBase]:
    """Every name as Prometheus has it, with its metric: the series of a histogram under its bare name."""
    found = {}
    for kind in (ApiMetrics, EngineMetrics):
        metrics = kind(CollectorRegistry())
        for metric in vars(metrics).values():
            if isinstance(metric, MetricWrapperBase):
                found[_name(metric)] = metric
    return found


def _name(metric: MetricWrapperBase) -> str:
    (family,) = metric.describe()
    return f"{family.name}_total" if family.type == "counter" else family.name


def metrics_page() -> str:
    lines = [METRICS_HEAD]
    for heading, kind in (("The API", ApiMetrics), ("The engine", EngineMetrics)):
        metrics = [each for each in vars(kind(CollectorRegistry())).values() if isinstance(each, MetricWrapperBase)]
        lines += [f"## {heading}", "", "| metric | type | meaning |", "| --- | --- | --- |"]
        for metric in metrics:
            (family,) = metric.describe()
            labels = "{" + ",".join(metric._labelnames) + "}" if metric._labelnames else ""
            lines.append(f"| `{_name(metric)}{labels}` | {family.type} | {family.documentation} |")
        lines.append("")
    lines.append(
        f"Beside these each has the usual `process_*`, `python_*` of its own process; nothing else begins with `{PREFIX}_`."
    )
    return "\n".join(lines) + "\n"


def configuration_page() -> str:
    lines, group = [CONFIGURATION_HEAD], ""
    for name, field in Settings.model_fields.items():
        if group_of(field) != group:
            group = group_of(field)
            lines += [
                f"## {group}",
                "",
                "| setting | flag, variable | values | default | meaning |",
                "| --- | --- | --- | --- | --- |",
            ]
        default = "unset" if field.default is None else f"`{as_text(field.default)}`"
        lines.append(
            f"| `{name}` | `{flag(name)}`<br>`{variable(name)}` | {_values(field)} | {default} | {_cell(field.description or '')} |"
        )
        following = list(Settings.model_fields)[list(Settings.model_fields).index(name) + 1 :]
        if not following or group_of(Settings.model_fields[following[0]]) != group:
            lines.append("")
    return "\n".join(lines).rstrip() + "\n" + OTHER_VARIABLES


def _values(field: FieldInfo) -> str:
    kinds: Iterable[object] = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{kind}`" for kind in kinds)
    kind = next(iter(kinds), field.annotation)
    word = {int: "whole number", float: "number", bool: "`true`, `false`", Path: "path"}.get(kind, "text")  # type: ignore[call-overload]
    low = next((bound.ge for bound in field.metadata if hasattr(bound, "ge")), None)
    high = next((bound.le for bound in field.metadata if hasattr(bound, "le")), None)
    if low is None:
        return str(word)
    return f"{word}, {low:,} to {high:,}" if high is not None else f"{word}, from {low:,}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES: Mapping[str, Callable[[], str]] = {"metrics.md": metrics_page, "configuration.md": configuration_page}


if __name__ == "__main__":
    for page_name, make in PAGES.items():
        (DOCS / page_name).write_text(make())
