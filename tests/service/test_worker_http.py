"""The engine's port: metrics and health while the step loop is busy."""

import json
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from service.api_keys import add_key
from service.errors import PortInUse
from service.settings import Settings
from service.worker.http import EngineHttp


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(port, path, **headers):
    try:
        asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
        with urllib.request.urlopen(asked, timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_it_answers_metrics_and_health(port):
    registry = CollectorRegistry()
    Counter("midsentence_things", "Things.", registry=registry).inc(3)
    reasons = {"starting": "the model is being loaded"}
    with EngineHttp(Settings(engine_port=port), registry, lambda: reasons):
        assert get(port, "/livez")[0] == 200
        status, body = get(port, "/readyz")
        assert (status, json.loads(body)["reasons"]) == (503, reasons)
        reasons = {}
        assert get(port, "/readyz")[0] == 200
        assert b"midsentence_things_total 3.0" in get(port, "/metrics?x=1")[1]
        assert "version" in json.loads(get(port, "/version")[1])
        assert get(port, "/nothing")[0] == 404
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_where_there_are_keys_only_probes_are_answered_without_one(port, tmp_path):
    key = add_key(tmp_path / "keys", "operator")
    settings = Settings(engine_port=port, api_keys_file=tmp_path / "keys")
    reasons = {}
    with EngineHttp(settings, CollectorRegistry(), lambda: reasons):
        for path, status in (("/livez", 200), ("/readyz", 200), ("/metrics", 401), ("/version", 401), ("/nothing", 401)):
            assert get(port, path)[0] == status
            assert get(port, path, Authorization="Bearer ms-wrong")[0] == status
        assert get(port, "/metrics", Authorization=f"Bearer {key}")[0] == 200
        reasons = {"redis": "paused: no answer from /secret/path"}
        status, body = get(port, "/readyz")
        assert (status, list(json.loads(body)["reasons"])) == (503, ["redis"])
        assert b"secret" not in body


def test_a_taken_port_is_refused_with_the_flag_that_helps(port):
    with (
        EngineHttp(Settings(engine_port=port), CollectorRegistry(), dict),
        pytest.raises(PortInUse, match="choose another --engine-port"),
        EngineHttp(Settings(engine_port=port), CollectorRegistry(), dict),
    ):
        raise AssertionError


def test_port_0_is_off():
    with EngineHttp(Settings(engine_port=0), CollectorRegistry(), dict):
        pass
