"""Files of the data directory: ours alone, and never somewhere else through a link."""

import os

import pytest

from service.errors import DirectoryError, RedisStartFailed
from service.processes import FileLock, prepare_directory, write_private
from service.redis_server import refuse_links
from service.sizing import existing_pages
from storage.errors import StorageError
from storage.store_file import load_store_file


@pytest.fixture
def victim(tmp_path):
    """A file elsewhere, which a link in our directory leads to."""
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


def test_a_directory_that_everybody_writes_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(DirectoryError, match=f"chmod 700 {tmp_path}"):
        prepare_directory(tmp_path)
    tmp_path.chmod(0o750)
    assert prepare_directory(tmp_path) == tmp_path


def test_a_small_file_replaces_a_link_and_spares_what_it_leads_to(tmp_path, victim):
    place = tmp_path / "redis.pid"
    place.symlink_to(victim)
    (tmp_path / f".redis.pid.{os.getpid()}").symlink_to(victim)  # the name that is written first can be foretold
    write_private(place, "42\n")
    assert victim.read_text() == "precious"
    assert not place.is_symlink()
    assert (place.read_text(), place.stat().st_mode & 0o777) == ("42\n", 0o600)


def test_a_lock_is_not_taken_through_a_link(tmp_path, victim):
    (tmp_path / "it.lock").symlink_to(victim)
    with pytest.raises(DirectoryError, match=r"it\.lock"):
        FileLock(tmp_path / "it.lock", "it").acquire()
    assert victim.read_text() == "precious"


def test_the_mark_of_the_store_is_not_read_through_a_link(tmp_path, victim):
    (tmp_path / "store.json").symlink_to(victim)
    with pytest.raises(StorageError, match=r"store\.json"):
        load_store_file(tmp_path / "store.json")


@pytest.mark.parametrize("header", [b'{"a":' * 10_000, b'{"kv_pages": {"shape": [5]}, "kv_pages": {"shape": [7]}}', b"{}"])
def test_a_header_that_is_not_ours_says_nothing_of_the_size_of_a_pool(tmp_path, header):
    (tmp_path / "pool.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert existing_pages(tmp_path / "pool.safetensors") is None


def test_redis_is_not_started_on_links(tmp_path, victim):
    log = tmp_path / "redis" / "appendonlydir"
    log.mkdir(parents=True)
    (log / "appendonly.aof.1.incr.aof").symlink_to(victim)
    with pytest.raises(RedisStartFailed, match="is a symbolic link"):
        refuse_links(tmp_path / "redis")
