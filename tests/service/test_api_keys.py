"""The file of API keys: made, read, changed under a running server, and refused."""

import os
import re
import subprocess
import sys

import pytest

from service.api_keys import ApiKeys, add_key
from service.doctor import _access
from service.errors import SettingsError
from service.settings import Settings


@pytest.fixture
def path(tmp_path):
    return tmp_path / "api-keys"


def bearer(key):
    return f"Bearer {key}"


def test_a_key_opens_its_own_tenant(path):
    alice, bob = add_key(path, "alice"), add_key(path, "bob")
    keys = ApiKeys(path)
    assert keys.tenant_of(bearer(alice)) == "alice"
    assert keys.tenant_of(bearer(bob)) == "bob"
    assert keys.tenant_of(f"bearer  {bob} ") == "bob"


def test_the_file_holds_no_key_and_is_private(path):
    key = add_key(path, "alice")
    assert path.stat().st_mode & 0o777 == 0o600
    assert key not in path.read_text()
    assert re.fullmatch(r"alice [0-9a-f]{64}\n", path.read_text())
    assert len(key) > 43  # 256 bits in base64


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Bearer ms-wrong", "Basic {key}", "{key}", "Bearer {key}x", "Bearer é"]
)
def test_anything_else_opens_nothing(path, header):
    key = add_key(path, "alice")
    assert ApiKeys(path).tenant_of(header.format(key=key)) is None


def test_a_hash_is_no_key(path):
    add_key(path, "alice")
    assert ApiKeys(path).tenant_of(bearer(path.read_text().split()[1])) is None


def test_every_known_key_is_compared_wherever_the_right_one_stands(path, monkeypatch):
    """Else the time of an answer tells how far the search came."""
    given = [add_key(path, f"tenant-{i}") for i in range(5)]
    keys, compared = ApiKeys(path), []

    def compare(a, b):
        compared.append(a)
        return a == b

    monkeypatch.setattr("service.api_keys.hmac.compare_digest", compare)
    for key in (given[0], given[4], "ms-wrong"):
        compared.clear()
        keys.tenant_of(bearer(key))
        assert len(compared) == 5


def test_keys_are_added_and_revoked_while_the_server_runs(path):
    old = add_key(path, "alice")
    keys = ApiKeys(path)
    new = add_key(path, "alice")
    assert (keys.tenant_of(bearer(old)), keys.tenant_of(bearer(new))) == ("alice", "alice")
    path.write_text(path.read_text().splitlines(keepends=True)[1])
    assert (keys.tenant_of(bearer(old)), keys.tenant_of(bearer(new))) == (None, "alice")


def test_a_file_that_goes_away_or_becomes_everybodys_grants_nothing(path):
    key = add_key(path, "alice")
    keys = ApiKeys(path)
    path.chmod(0o622)
    assert keys.tenant_of(bearer(key)) is None
    path.chmod(0o600)
    assert keys.tenant_of(bearer(key)) == "alice"
    path.unlink()
    assert keys.tenant_of(bearer(key)) is None


def test_a_bad_line_is_refused_at_the_start_and_grants_nothing_later(path):
    key = add_key(path, "alice")
    keys = ApiKeys(path)
    with path.open("a") as file:
        file.write(f"# bob left\n\nbob {'g' * 64}")
    assert keys.tenant_of(bearer(key)) == "alice"
    with pytest.raises(SettingsError, match=r"line 4: not a tenant and the SHA-256 of a key"):
        ApiKeys(path)
    assert ApiKeys.tenant_of(keys, bearer(add_key(path, "carol"))) == "carol"  # on a line of its own


@pytest.mark.parametrize("tenant", ["", "a:b", "a b", "a\n", "-a", "ä", "x" * 65, "../a"])
def test_a_name_that_cannot_stand_in_a_redis_key_is_refused(path, tenant):
    with pytest.raises(SettingsError, match="cannot name a tenant"):
        add_key(path, tenant)
    assert not path.exists()


def test_a_link_is_not_written_through(path, tmp_path):
    (tmp_path / "elsewhere").write_text("")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match="cannot add a key"):
        add_key(path, "alice")


def test_a_missing_file_is_refused_with_the_command_that_makes_it(path):
    with pytest.raises(SettingsError, match="midsentence keys add TENANT"):
        ApiKeys(path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_others_are_served_only_with_keys_or_by_express_wish(host, path):
    with pytest.raises(ValueError, match=r"api_keys_file|at least 1"):
        Settings(host=host)
    if host:
        assert Settings(host=host, api_keys_file=path).host == host
        assert Settings(host=host, allow_anonymous=True).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_this_machine_needs_no_key(host):
    assert Settings(host=host).api_keys_file is None


def test_doctor_looks_at_keys_and_at_who_is_served(path, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def found(**settings):
        return {finding.what: (str(finding.status), finding.found) for finding in _access(Settings(**settings))}

    assert found()["API keys"][0] == "ok"
    assert found(host="0.0.0.0", allow_anonymous=True)["API keys"][0] == "warn"
    assert found(api_keys_file=path)["API keys"][0] == "fail"
    add_key(path, "alice")
    assert found(api_keys_file=path)["API keys"] == ("ok", str(path))
    assert "cache folder" not in found()
    (tmp_path / "cache" / "midsentence").mkdir(parents=True)
    (tmp_path / "cache" / "midsentence").chmod(0o777)
    assert found()["cache folder"][0] == "fail"


def test_the_command_prints_a_key_that_works(path):
    command = [sys.executable, "-m", "service.cli", "keys", "add", "alice"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MIDSENTENCE_")}
    refused = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert refused.returncode == 78
    assert "--api-keys-file" in refused.stderr
    done = subprocess.run(
        [*command, "--api-keys-file", str(path)], capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    assert ApiKeys(path).tenant_of(bearer(done.stdout.strip())) == "alice"
