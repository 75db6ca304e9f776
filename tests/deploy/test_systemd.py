"""The systemd units: read by systemd itself where it is there, and held against what the product needs."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from service.processes import Exit
from service.settings import Settings, load_settings

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
UNITS = sorted(path.name for path in FOLDER.glob("*.service"))
OURS = [name for name in UNITS if "redis" not in name]


def unit(name):
    parser = configparser.RawConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(FOLDER / name)
    return parser["Service"]


def lines(name, key):
    """A key that may be given several times."""
    return re.findall(rf"^{key}=(.*)$", (FOLDER / name).read_text(), re.MULTILINE)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_wrong(tmp_path):
    for path in FOLDER.iterdir():
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", path.read_text(), flags=re.MULTILINE)
        (tmp_path / path.name).write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *map(str, tmp_path.iterdir())], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", UNITS)
def test_every_unit_is_started_again_ends_in_order_and_is_hardened(name):
    service = unit(name)
    assert service["User"] == "midsentence"
    assert service["Restart"] == "always"
    assert int(service["TimeoutStopSec"]) > Settings().drain_timeout_seconds
    assert service["ProtectSystem"] == "strict"
    assert service["NoNewPrivileges"] == service["PrivateTmp"] == "yes"
    assert service["CapabilityBoundingSet"] == ""
    assert service["LimitCORE"] == "0"


@pytest.mark.parametrize("name", OURS)
def test_a_refusal_is_not_tried_again_for_ever(name):
    assert int(unit(name)["RestartPreventExitStatus"]) == Exit.CONFIG


@pytest.mark.parametrize("name", OURS)
def test_the_settings_it_gives_are_settings_and_lie_where_it_may_write(name):
    variables = dict(pair.split("=", 1) for line in lines(name, "Environment") for pair in line.split())
    ours = {key: value for key, value in variables.items() if key.startswith("MIDSENTENCE_")}
    settings = load_settings(environ=ours).settings
    service = unit(name)
    assert str(settings.data_dir) == f"/var/lib/{service['StateDirectory']}"
    assert variables["XDG_CACHE_HOME"] == f"/var/cache/{service['CacheDirectory']}"
    assert service["ExecStart"].split()[1] in ("serve", "engine", "api")
    if settings.redis_url is not None:
        redis = unit("midsentence-redis.service")
        assert settings.redis_url == f"unix://{redis['ExecStart'].split('--unixsocket ')[1].split()[0]}"
        assert settings.redis_url.startswith(f"unix:///run/{redis['RuntimeDirectory']}/")


def test_serve_ends_its_own_children_and_replaces_the_api_at_a_reload():
    service = unit("midsentence.service")
    assert service["KillMode"] == "mixed"
    assert service["ExecReload"] == "/bin/kill -USR2 $MAINPID"
