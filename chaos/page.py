"""The report as a page: what was promised, what was tried, how often, and what came of it. Made from the JSON of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from chaos.scenarios import SCENARIOS

#: What the product promises, and the scenarios that try to break it.
PROMISES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "G1": (
        "A token that a client saw is in the durable log, and is never changed, removed or repeated.",
        (
            "engine_kills", "redis_kills", "mixed_kills", "everything_kills", "failpoint_kills", "bad_networks", "partitions",
            "redis_moods", "power_losses", "power_losses_machine", "long_mix",
        ),
    ),
    "G2": (
        "Every accepted job comes to an end, or is listed as lost: none is forgotten, none is made twice.",
        (
            "api_kills", "api_failpoint_kills", "supervisor_kills", "one_key", "many_jobs", "long_run", "crowds", "bad_luck",
            "poison_exit", "oom_kills",
        ),
    ),
    "G3": (
        "The output is that of an uninterrupted run, token for token.",
        ("engine_kills", "standby_kills", "pressure_kills", "everything_kills", "two_engines", "engine_terms", "service_terms"),
    ),
    "G4": (
        "A page is used only if its checksum and its identity are right; else its tokens are computed again.",
        ("bit_flips", "page_swaps", "old_pools", "power_losses", "disk_errors"),
    ),
    "G5": (
        "Of all incarnations of all engines, one owns a job, and only its commits count.",
        ("stale_engines", "stale_at_points", "partitions", "two_engines", "redis_pauses", "second_starts", "clock_steps"),
    ),
    "G6": (
        "What is damaged beyond this is refused in words, never papered over.",
        ("redis_put_back", "all_put_back", "second_starts", "bit_flips", "poor_starts"),
    ),
}  # fmt: skip


def page(report: Mapping[str, Any]) -> str:
    """Markdown. ``report``: as ``report.write_json`` writes it."""
    scenarios: Sequence[Mapping[str, Any]] = report["scenarios"]
    fired, faults = (sum(found[key] for found in scenarios) for key in ("fired", "faults"))
    violations = sum(len(found["violations"]) + len(found["problems"]) for found in scenarios)
    jobs, tokens = (sum(found[key] for found in scenarios) for key in ("jobs", "tokens"))
    lines = [
        "# The chaos report",
        "",
        f"Tier `{report['tier']}`, seed {report['seed']}, model {report['model']}, {report['date']}; "
        f"{report['seconds'] // 60} minutes.",
        f"**{fired:,} of {faults:,} faults fired, {jobs:,} jobs, {tokens:,} tokens received by clients, {violations} violations.**",
        "Every run checks every guarantee of `chaos/guarantees.py`; a fault that cannot prove that it",
        f"fired fails its run. Again: `make chaos TIER={report['tier']} SEED={report['seed']}`.",
        *(["", f"**Not run for want of time: {', '.join(report['left_out'])}.**"] if report["left_out"] else []),
        "",
        "## Promises",
        "",
        "| | promise | tried by |",
        "| --- | --- | --- |",
    ]
    for name, (text, by) in PROMISES.items():
        lines.append(f"| {name} | {text} | {', '.join(f'[`{scenario}`](#{scenario})' for scenario in by)} |")
    lines += ["", "## Scenarios", "", "| scenario | covers | runs | faults fired | jobs | tokens | violations |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    known = {scenario.name: scenario for scenario in SCENARIOS}
    for found in scenarios:
        name, bad = found["name"], len(found["violations"]) + len(found["problems"])
        lines.append(
            f"| [`{name}`](#{name}) | {known[name].covers} | {found['runs']} | {found['fired']:,} of {found['faults']:,} "
            f"| {found['jobs']:,} | {found['tokens']:,} | {bad} |"
        )
    lines += ["", "## Named points", "", "How often the product died, stopped or failed at each.", ""]
    lines += ["| point | fired |", "| --- | --- |"]
    lines += [f"| `{point}` | {count:,} |" for point, count in report["failpoints"].items()]
    for found in scenarios:
        lines += ["", f"### {found['name']}", "", known[found["name"]].meaning + ".", ""]
        lines += [f"- {kind}: {count}" for kind, count in sorted(found["by_fault"].items())]
        lines += [f"- **{problem}**" for problem in (*found["violations"], *found["problems"])]
    return "\n".join(lines) + "\n"
