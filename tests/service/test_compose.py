"""docker-compose.yml against the essentials of the compose specification, and against what the product needs of it.

There is no Docker here: these tests keep the compose file honest. The schema holds only the keys that we use, so a misspelt or
misplaced one is found; the full schema of compose-spec was tried by hand.
"""

import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from service.settings import Settings, load_settings

ROOT = Path(__file__).parents[2]

_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
_DURATION = {"type": "string", "pattern": r"^(\d+h)?(\d+m)?(\d+s)?$"}
_HEALTHCHECK = {
    "type": "object",
    "additionalProperties": False,
    "required": ["test"],
    "properties": {
        "test": {"type": "array", "items": _TEXT, "minItems": 2},
        "interval": _DURATION,
        "timeout": _DURATION,
        "start_period": _DURATION,
        "retries": {"type": "integer"},
    },
}
_SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "build": _TEXT,
        "image": _TEXT,
        "profiles": _TEXTS,
        "command": _TEXTS,
        "init": {"type": "boolean"},
        "restart": {"enum": ["no", "always", "unless-stopped"]},
        "stop_grace_period": _DURATION,
        "read_only": {"type": "boolean"},
        "tmpfs": _TEXTS,
        "cap_drop": _TEXTS,
        "security_opt": _TEXTS,
        "ulimits": {"type": "object", "additionalProperties": {"type": "integer"}},
        "environment": {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean", "null"]}},
        "ports": _TEXTS,
        "volumes": _TEXTS,
        "healthcheck": _HEALTHCHECK,
        "depends_on": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["condition"],
                "properties": {"condition": {"enum": ["service_started", "service_healthy"]}},
            },
        },
    },
}
COMPOSE_SCHEMA = {
    "type": "object",
    "required": ["services"],
    "additionalProperties": False,
    "patternProperties": {"^x-": {}},
    "properties": {
        "services": {"type": "object", "additionalProperties": _SERVICE},
        "volumes": {"type": "object", "additionalProperties": {"type": "null"}},
    },
}


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


@pytest.fixture(scope="module")
def services(compose):
    return compose["services"]


def test_it_has_the_shape_of_a_compose_file(compose):
    jsonschema.validate(compose, COMPOSE_SCHEMA)


def test_the_schema_finds_a_misspelt_key(compose):
    broken = {**compose, "services": {"api": {"image": "x", "helthcheck": {}}}}
    with pytest.raises(jsonschema.ValidationError, match="helthcheck"):
        jsonschema.validate(broken, COMPOSE_SCHEMA)


def test_redis_keeps_what_it_acknowledges(services):
    command = services["redis"]["command"][1:]
    options = dict(zip(command[::2], command[1::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--appendfsync"] == "always"
    assert options["--no-appendfsync-on-rewrite"] == "no"
    assert options["--maxmemory-policy"] == "noeviction"
    assert "--maxmemory" in options


def test_every_service_restarts_drains_is_watched_and_keeps_its_data(compose, services):
    for name, service in services.items():
        assert service["restart"] == "unless-stopped", name
        assert int(service["stop_grace_period"].rstrip("s")) > Settings().drain_timeout_seconds, name
        assert service["healthcheck"]["test"][0] == "CMD", name
        mounted = {volume.partition(":")[0] for volume in service["volumes"]}
        ours = {source for source in mounted if source.startswith("./")}
        assert mounted - ours <= compose["volumes"].keys(), name
        assert all((ROOT / source).is_dir() for source in ours), name


def test_what_watches_is_asked_for_and_reached_from_this_machine_only(services):
    watching = {name for name, service in services.items() if service.get("profiles") == ["observability"]}
    assert watching == {"prometheus", "grafana"}
    for name in watching:
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", services[name]["image"]), name
        assert all(port.startswith("127.0.0.1:") for port in services[name]["ports"]), name
        assert not any(volume.startswith("./") and not volume.endswith(":ro") for volume in services[name]["volumes"]), name


def test_engine_and_api_share_no_data_directory(services):
    def data_of(name):
        return {volume for volume in services[name]["volumes"] if volume.endswith(":/var/lib/midsentence")}

    assert data_of("engine")
    assert data_of("api")
    assert not data_of("engine") & data_of("api")


def test_the_settings_it_gives_are_settings(services):
    """What a typing error would break only in production."""
    for name in ("engine", "api"):
        environment = {key: re.sub(r"\$\{\w+:-(.*)\}", r"\1", str(value)) for key, value in services[name]["environment"].items()}
        settings = load_settings(environ=environment).settings
        assert settings.redis_url == "redis://redis:6379/0"
        assert settings.host == "0.0.0.0"
        assert services[name]["command"] == [name]
        port = settings.engine_port if name == "engine" else settings.port
        assert f"127.0.0.1:{port}/livez" in services[name]["healthcheck"]["test"][-1]


def test_the_api_is_published_to_this_machine_only(services):
    """It asks nobody for a key."""
    assert services["api"]["environment"]["MIDSENTENCE_ALLOW_ANONYMOUS"] == "true"
    assert services["api"]["ports"] == ["127.0.0.1:8710:8710"]
    assert "ports" not in services["engine"]
    assert "ports" not in services["redis"]


def test_the_image_runs_as_nobody_special():
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^USER midsentence$", text, re.MULTILINE)
    assert re.search(r"^FROM python:3\.11-slim", text, re.MULTILINE)
    copied = set(re.findall(r"^COPY (\w+) \./\w+$", text, re.MULTILINE))
    assert {"engine", "storage", "recovery", "service"} <= copied
