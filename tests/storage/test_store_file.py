"""store.json and the table of PROTOCOL.md 5."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import StorageError
from storage.records import StoreIdentity
from storage.store_file import StoreFile, Verdict, describe_wrong_store, judge, load_store_file, save_store_file

FILE = StoreFile("engine-1", "store-1", 2, 100)


@pytest.mark.parametrize(
    ("file", "redis", "verdict"),
    [
        (None, None, Verdict.CREATE),
        (None, StoreIdentity("store-9", 5, 7), Verdict.JOIN),
        (FILE, None, Verdict.REFUSE_GONE),
        (FILE, StoreIdentity("store-2", 2, 100), Verdict.REFUSE_OTHER),
        (FILE, StoreIdentity("store-1", 2, 100), Verdict.GO_ON),
        (FILE, StoreIdentity("store-1", 2, 101), Verdict.GO_ON),
        (FILE, StoreIdentity("store-1", 3, 5), Verdict.GO_ON),
        (FILE, StoreIdentity("store-1", 2, 99), Verdict.REFUSE_LOST),
        (FILE, StoreIdentity("store-1", 1, 1000), Verdict.REFUSE_LOST),
    ],
)
def test_the_table(file: StoreFile | None, redis: StoreIdentity | None, verdict: Verdict):
    assert judge(file, redis) is verdict
    assert verdict.refused == verdict.name.startswith("REFUSE")


def test_refusals_say_what_is_wrong():
    ours = FILE.identity
    assert "lost commits 91..100" in str(describe_wrong_store(ours, StoreIdentity("store-1", 2, 90)))
    assert "gone" in str(describe_wrong_store(ours, None))
    assert "store-2" in str(describe_wrong_store(ours, StoreIdentity("store-2", 2, 90)))
    assert "--accept-store" in describe_wrong_store(ours, None).hint


def test_saved_and_loaded(tmp_path: Path):
    path = tmp_path / "store.json"
    assert load_store_file(path) is None
    save_store_file(path, FILE)
    save_store_file(path, StoreFile("engine-1", "store-1", 2, 101))
    assert load_store_file(path) == StoreFile("engine-1", "store-1", 2, 101)
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["store.json"]


def test_what_a_kill_left_is_written_over(tmp_path: Path):
    (tmp_path / ".store.json.tmp").write_text("x" * 1000)
    save_store_file(tmp_path / "store.json", FILE)
    assert load_store_file(tmp_path / "store.json") == FILE
    assert os.listdir(tmp_path) == ["store.json"]


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"engine_id":"e"}', "[" * 100_000,
        '{"engine_id":"e","store_id":"s","epoch":1,"commit":-1}',
        '{"engine_id":"e","store_id":"s","epoch":true,"commit":1}',
        '{"engine_id":"e","store_id":"s","epoch":1.5,"commit":1}',
        '{"engine_id":"e","store_id":"s","epoch":1,"commit":1,"more":1}',
        '{"engine_id":null,"store_id":"s","epoch":1,"commit":1}',
    ],
)  # fmt: skip
def test_a_broken_file_is_named_and_never_guessed(tmp_path: Path, text: str):
    path = tmp_path / "store.json"
    path.write_text(text)
    with pytest.raises(StorageError, match=r"store\.json"):
        load_store_file(path)
    assert path.read_text() == text


@given(st.binary(max_size=200))
def test_any_bytes_are_a_named_error_or_a_file(tmp_path_factory: pytest.TempPathFactory, data: bytes):
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_bytes(data)
    with contextlib.suppress(StorageError):
        loaded = load_store_file(path)
        assert loaded is None or loaded.epoch >= 0


@pytest.mark.parametrize(("point", "commit"), [("store_file.before_rename", 100), ("store_file.after_rename", 101)])
def test_killed_while_saving_it_is_the_old_or_the_new(tmp_path: Path, point: str, commit: int):
    path = tmp_path / "store.json"
    save_store_file(path, FILE)
    code = (
        "from pathlib import Path; from storage.store_file import *;"
        f"save_store_file(Path({str(path)!r}), StoreFile('engine-1', 'store-1', 2, 101))"
    )
    environment = {**os.environ, "MIDSENTENCE_TESTING": "1", "MIDSENTENCE_FAILPOINTS": f"{point}=kill"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == -9
    loaded = load_store_file(path)
    assert loaded is not None
    assert loaded.commit == commit
