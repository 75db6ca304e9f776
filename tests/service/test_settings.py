"""Flags, variables, file, defaults: who wins, and what is said when something is wrong."""

import pytest

from service.errors import SettingsError
from service.flags import with_settings
from service.settings import Settings, as_text, load_settings, redacted


def load(flags=None, *, config=None, **variables):
    return load_settings(flags, config=config, environ=variables)


def test_flags_win_over_variables_over_file_over_defaults(tmp_path):
    file = tmp_path / "midsentence.toml"
    file.write_text("port = 1001\npage_size = 8\nqueue_limit = 7\n")
    loaded = load(
        {"port": "3003", "page_size": None},
        MIDSENTENCE_DATA_DIR=str(tmp_path),
        MIDSENTENCE_PORT="2002",
        MIDSENTENCE_PAGE_SIZE="4",
    )
    settings = loaded.settings
    assert (settings.port, settings.page_size, settings.queue_limit, settings.max_running) == (3003, 4, 7, 32)
    assert loaded.sources == {
        "port": "--port",
        "page_size": "MIDSENTENCE_PAGE_SIZE",
        "queue_limit": f"queue_limit in {file}",
        "data_dir": "MIDSENTENCE_DATA_DIR",
    }


@pytest.mark.parametrize(
    ("flags", "variables", "says"),
    [
        ({"page_size": "0"}, {}, "--page-size: input should be greater than or equal to 1, got '0'"),
        ({"page_size": "many"}, {}, "--page-size: input should be a valid integer"),
        ({}, {"MIDSENTENCE_LEASE_SECONDS": "nan"}, "MIDSENTENCE_LEASE_SECONDS"),
        ({}, {"MIDSENTENCE_PAGE_SIE": "8"}, "unknown variable MIDSENTENCE_PAGE_SIE (did you mean MIDSENTENCE_PAGE_SIZE?)"),
        ({}, {"MIDSENTENCE_DURABILITY": "crash"}, "MIDSENTENCE_DURABILITY: input should be 'process' or 'machine', got 'crash'"),
        ({"prefill_chunk": "100"}, {}, "prefill_chunk (100) must be a multiple of page_size (16)"),
        ({"max_step_tokens": "128"}, {}, "max_step_tokens (128) must hold one prefill_chunk (256)"),
        ({"redis_url": "http://user:secret@host"}, {}, "--redis-url: must begin with redis://, rediss:// or unix://"),
        ({"port": "8711"}, {}, "engine_port and port are both 8711"),
        ({"redis_url": "redis://u:secret@[bad"}, {}, "--redis-url: is not a URL"),
        ({"redis_url": "redis://[:secret@]:1"}, {}, "--redis-url: is not a URL"),
        ({"redis_url": "redis://u:secret/1@h"}, {}, "--redis-url: is not a URL"),
    ],
)
def test_what_is_wrong_is_named_as_the_user_wrote_it(tmp_path, flags, variables, says):
    with pytest.raises(SettingsError) as refused:
        load({"data_dir": str(tmp_path), **flags}, **variables)
    assert says in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("page_sice = 8", "unknown key 'page_sice'"),
        ("page_size = ", "not valid TOML"),
        ("data_dir = '/elsewhere'", "data_dir cannot be set in"),
        ("page_size = 'x'", "page_size in "),
        ("page_size = " + "9" * 5000, "not valid TOML"),
        ("page_size = " + "[" * 100_000, "not valid TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tmp_path, text, says):
    (tmp_path / "midsentence.toml").write_text(text)
    with pytest.raises(SettingsError, match=r"midsentence\.toml") as refused:
        load({"data_dir": str(tmp_path)})
    assert says in str(refused.value)


@pytest.mark.parametrize("name", ["none.toml", "a\0b", "x" * 300])
def test_a_named_file_must_be_there(tmp_path, name):
    with pytest.raises(SettingsError, match="cannot read the configuration file"):
        load(config=tmp_path / name)


@pytest.mark.parametrize("place", ["~nobody-has-this-name", "a\0b", "x" * 300])
def test_a_data_directory_that_cannot_be_is_refused(place):
    with pytest.raises(SettingsError):
        load({"data_dir": place})


def test_switches_for_tests_and_empty_values_are_no_settings():
    loaded = load(MIDSENTENCE_TESTING="1", MIDSENTENCE_FAILPOINTS="x", MIDSENTENCE_URL="http://h", MIDSENTENCE_REDIS_URL="")
    assert loaded.sources == {}
    assert loaded.settings == Settings()


def test_children_get_exactly_the_same_settings(tmp_path):
    """The supervisor hands them on as variables; the file may have changed since, and must not matter."""
    (tmp_path / "midsentence.toml").write_text("port = 1001\n")
    settings = load(
        {"data_dir": str(tmp_path), "allow_weak_durability": True, "lease_seconds": "2.5", "redis_url": "redis://:pw@h/0"}
    ).settings
    (tmp_path / "midsentence.toml").write_text("port = 2002\nthreads = 3\n")
    assert load_settings(environ=settings.environment()).settings == settings


def test_settings_are_frozen_and_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings()
    assert settings.data_dir == tmp_path / "midsentence-data"
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1  # type: ignore[misc]


def test_urls_are_where_a_client_on_this_machine_finds_us():
    assert Settings(host="0.0.0.0", allow_anonymous=True).client_url == "http://127.0.0.1:8710"
    assert Settings(host="::", engine_port=9, allow_anonymous=True).engine_url == "http://[::1]:9"
    assert Settings(engine_port=0).engine_url is None


def test_passwords_are_not_shown():
    assert redacted("redis_url", "redis://user:secret@host:1/0") == "redis://***@host:1/0"
    assert redacted("redis_url", "redis://user:s@cret@[bad") == "redis://***@[bad"
    assert redacted("redis_url", "unix:///s?db=1&password=secret&x=2") == "unix:///s?db=1&password=***&x=2"
    assert as_text(604800.0) == "604800"


def test_every_setting_is_described_bounded_and_a_flag():
    def command(loaded):
        raise AssertionError

    flags = with_settings()(command).__annotations__
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert name in flags
        if field.annotation in (int, float, int | None):
            assert field.metadata, f"{name} has no bounds"
