"""Prometheus rules and the Grafana dashboard: every query parses, every metric exists, every alert has its entry in the runbook."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml

from tests.docs.pages import metric_names
from tests.docs.test_pages import anchors_of

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = [rule for group in yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "midsentence.json").read_text())
QUERIES = [rule["expr"] for rule in RULES] + [
    target["expr"].replace("$__rate_interval", "1m") for panel in DASHBOARD["panels"] for target in panel["targets"]
]
#: What Prometheus itself knows of each target.
ITS_OWN = {"up"}


def selected(node):
    """Names of all metrics that a parsed query selects."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node.name
    for name in ("expr", "lhs", "rhs", "param", "vector_selector"):
        child = getattr(node, name, None)
        if child is not None:
            yield from selected(child)
    for child in getattr(node, "args", ()):
        yield from selected(child)


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_parses_and_asks_for_metrics_that_exist(query):
    known = set(metric_names()) | ITS_OWN | {rule["record"] for rule in RULES if "record" in rule}
    names = list(selected(promql_parser.parse(query)))
    assert names
    for name in names:
        bare = re.sub(r"_(bucket|sum|count)$", "", name)
        assert name in known or metric_names()[bare].describe()[0].type == "histogram", name


def test_labels_that_queries_name_exist():
    labels = {name: set(metric._labelnames) for name, metric in metric_names().items()}
    for query in QUERIES:
        for name, inside in re.findall(r"(midsentence_[a-z_]+)\{([^}]+)\}", query):
            assert set(re.findall(r"(\w+)=", inside)) <= labels[name], query


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_says_what_is_wrong_and_has_its_entry(alert):
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"]["summary"]
    page, _, anchor = alert["annotations"]["runbook"].partition("#")
    assert anchor == alert["alert"].lower()
    assert anchor in anchors_of(ROOT / page)


def test_the_dashboard_shows_what_is_worth_knowing():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    shown = {name for query in QUERIES for name in selected(promql_parser.parse(query))}
    wanted = ("page_faults_total", "swapped_pages_total", "attention_duration_seconds_bucket", "kv_cache_usage_perc")
    assert shown >= {f"midsentence_{name}" for name in wanted}  # what the article measures


def test_what_compose_mounts_is_where_the_files_say():
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    provider = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/midsentence.yml").read_text())["providers"][0]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"] if volume.startswith("./"))
    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]
    targets = [
        target
        for job in yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    ]
    for target in targets:
        name, port = target.split(":")
        assert port in services[name]["environment"].values()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is in Debian's package prometheus")
@pytest.mark.parametrize("command", [("check", "config", "prometheus.yml"), ("test", "rules", "rules_test.yml")])
def test_promtool_agrees(command):
    *verb, file = command
    done = subprocess.run(["promtool", *verb, file], cwd=PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
