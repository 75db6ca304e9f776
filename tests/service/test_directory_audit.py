"""A mark that is just being written is no left-over of a process that died."""

import threading

from service.directory_audit import file_findings, observe
from storage.store_file import StoreFile, save_store_file


def test_a_mark_that_is_written_again_and_again_is_never_a_left_over(tmp_path):
    tmp_path.chmod(0o700)
    done = threading.Event()

    def write():
        commit = 0
        while not done.is_set():
            save_store_file(tmp_path / "store.json", StoreFile("engine-1", "store-1", 1, commit))
            commit += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(500):
            assert list(file_findings(observe(tmp_path))) == []
    finally:
        done.set()
        writer.join()


def test_what_a_dead_process_left_is_named(tmp_path):
    tmp_path.chmod(0o700)
    (tmp_path / ".store.json.tmp").write_text("{")
    (found,) = file_findings(observe(tmp_path))
    assert (found.where, found.what) == (".store.json.tmp", "was left behind by a process that died")
