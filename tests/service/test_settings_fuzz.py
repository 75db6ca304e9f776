"""Whatever stands in flags, variables and file: a Settings or a SettingsError, and no password in its words."""

from hypothesis import example, given
from hypothesis import strategies as st

from service.errors import SettingsError
from service.settings import OTHER_VARIABLES, Settings, load_settings, redacted, variable

SECRET = "s3cr3t"
NAMES = st.sampled_from(list(Settings.model_fields))
BEFORE, BEHIND = ["redis://", "rediss://", "unix://", "http://", "redis:", "redis://[", ""], ["", "x", "/0", "]:1", "@h"]
PASSWORDS = [f":{SECRET}@", f"u:{SECRET}@h", f"u:@{SECRET}@[::1", f"h/?password={SECRET}", f"/s?db=1&password={SECRET}&x"]
URLS = st.builds("{}{}{}".format, st.sampled_from(BEFORE), st.sampled_from(PASSWORDS), st.sampled_from(BEHIND))
NUMBERS = (st.integers() | st.floats()).map(str) | st.sampled_from(["1e400", "9" * 5000, "0x10", "1_000", "١", " 1 ", "true", "on"])
PLACES = st.sampled_from(["~", "~nobody-has-this-name/x", "\0", "a\0b", "/", ".", "", "x" * 5000, "\ud800"])
TEXTS = st.text(max_size=12) | NUMBERS | PLACES
VARIABLES = NAMES.map(variable) | st.sampled_from(sorted(OTHER_VARIABLES)) | st.text(max_size=5)

VALUES = st.recursive(
    st.booleans() | st.integers() | st.floats() | TEXTS.filter(str.isprintable) | st.dates(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


def as_toml(value):
    """Close enough to TOML that most of it parses."""
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("'", "") + "'"
    return str(value).lower()


TABLES = st.dictionaries(NAMES | st.text(max_size=4), VALUES, max_size=4)
FILES = st.binary(max_size=60) | TABLES.map(
    lambda table: "\n".join(f"{name} = {as_toml(value)}" for name, value in table.items()).encode(errors="replace")
)


def settings_or_refusal(*args, **options):
    try:
        loaded = load_settings(*args, **options)
    except SettingsError as error:
        shown = str(error)
    else:
        assert loaded.settings == Settings.model_validate(loaded.settings.model_dump())
        shown = " ".join(redacted(name, value) for name, value in loaded.settings if value is not None)
        assert load_settings(environ=loaded.settings.environment()).settings == loaded.settings
    assert SECRET not in shown, shown


def with_url(name):
    return st.dictionaries(st.just(name), URLS, max_size=1)


@given(environ=st.builds(dict.__or__, st.dictionaries(VARIABLES, TEXTS, max_size=4), with_url("MIDSENTENCE_REDIS_URL")))
@example({"MIDSENTENCE_CONFIG": "a\0b"})
@example({"MIDSENTENCE_DATA_DIR": "~nobody-has-this-name"})
@example({"MIDSENTENCE_REDIS_URL": f"redis://u:{SECRET}@[bad"})
@example({"MIDSENTENCE_REDIS_URL": f"redis://h/?password={SECRET}"})
@example({"MIDSENTENCE_REDIS_URL": f"redis://[:{SECRET}@]:1"})
def test_any_variables(environ):
    settings_or_refusal(environ=environ)


@given(flags=st.builds(dict.__or__, st.dictionaries(NAMES, TEXTS | st.none() | st.booleans(), max_size=4), with_url("redis_url")))
def test_any_flags(flags):
    settings_or_refusal(flags, environ={})


@given(content=FILES)
@example(b"port = " + b"9" * 5000)
@example(b"port = " + b"[" * 100_000)
def test_any_file(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "fuzzed.toml"
    file.write_bytes(content)
    settings_or_refusal(config=file, environ={})
