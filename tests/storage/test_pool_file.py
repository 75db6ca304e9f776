"""The pool file: what is on disk, who may open it, what a bad or full disk does."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors import safe_open

from storage import pool_header
from storage.errors import PoolError, PoolLocked
from storage.pool_file import PoolFile, read_pool_header
from storage.pool_header import NotAPool
from storage.pool_make import DISK, Disk

GEOMETRY: dict[str, Any] = {
    "num_pages": 5, "page_shape": (3, 2, 16, 2, 8), "dtype": "float32", "model_fingerprint": "model-a",
}  # fmt: skip
PAGE_BYTES = 3 * 2 * 16 * 2 * 8 * 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool.safetensors"


@pytest.fixture
def pool(path: Path) -> Iterator[PoolFile]:
    with PoolFile.open(path, **GEOMETRY) as made:
        yield made


def page_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


def read(pool: PoolFile, page: int) -> tuple[np.ndarray, int]:
    out = np.empty(PAGE_BYTES, np.uint8)
    (checksum,) = pool.read_pages(page, out)
    return out, checksum


def write(pool: PoolFile, page: int, data) -> int:
    (checksum,) = pool.write_pages(page, data)
    return checksum


class TestContents:
    def test_what_is_written_is_read_and_hashed(self, pool: PoolFile):
        checksums = [write(pool, page, page_of(page)) for page in range(5)]
        assert checksums == [xxhash.xxh3_64_intdigest(page_of(page)) for page in range(5)]
        for page in range(5):
            data, checksum = read(pool, page)
            assert checksum == checksums[page]
            assert (data == page_of(page)).all()

    def test_pages_begin_as_zeros_and_can_be_zeroed(self, pool: PoolFile):
        assert not read(pool, 4)[0].any()
        write(pool, 1, page_of(1))
        write(pool, 2, memoryview(page_of(2)))
        pool.zero_page(1)
        assert not read(pool, 1)[0].any()
        assert (read(pool, 2)[0] == page_of(2)).all()

    def test_a_zeroed_page_keeps_its_blocks_and_zeros_are_not_written_again(self, path: Path):
        """A hole would be a full disk's to refuse, when the page is written the next time."""
        written: list[int] = []

        def count(fd: int, data: memoryview, offset: int) -> int:
            written.append(offset)
            return os.pwrite(fd, data, offset)

        with PoolFile.open(path, **GEOMETRY, disk=Disk(pwrite=count)) as pool:
            write(pool, 1, page_of(1))
            pool.zero_page(1)
            blocks = path.stat().st_blocks
            written.clear()
            for page in range(5):
                pool.zero_page(page)
            assert (written, path.stat().st_blocks) == ([], blocks)
            assert blocks * 512 >= path.stat().st_size

    def test_safetensors_reads_it(self, pool: PoolFile, path: Path):
        write(pool, 3, page_of(3))
        with safe_open(path, "np") as file:
            assert list(file.keys()) == ["kv_pages"]
            tensor = file.get_tensor("kv_pages")
            assert file.metadata()["pool_id"] == pool.pool_id
        assert (tensor.shape, tensor.dtype) == ((5, 3, 2, 16, 2, 8), np.float32)
        assert tensor[3].tobytes() == page_of(3).tobytes()

    @pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
    def test_dtypes(self, path: Path, dtype: str, width: int):
        with PoolFile.open(path, **{**GEOMETRY, "dtype": dtype}) as pool:
            assert pool.page_bytes == PAGE_BYTES // 4 * width
        assert read_pool_header(path).dtype == dtype
        with safe_open(path, "np") as file:
            assert file.get_slice("kv_pages").get_dtype() == {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]

    def test_the_data_begins_on_a_block_and_no_block_is_missing(self, pool: PoolFile, path: Path):
        assert pool.header.data_offset % 4096 == 0
        state = path.stat()
        assert state.st_size == pool.header.file_bytes
        assert state.st_blocks * 512 >= state.st_size
        assert state.st_mode & 0o777 == 0o600

    def test_a_flipped_bit_is_found(self, path: Path):
        with PoolFile.open(path, **GEOMETRY) as pool:
            checksum = write(pool, 2, page_of(2))
        data = bytearray(path.read_bytes())
        data[pool.header.data_offset + 2 * PAGE_BYTES + 1000] ^= 0x10
        path.write_bytes(data)
        with PoolFile.open(path, **GEOMETRY) as again:
            assert again.pool_id == pool.pool_id
            assert read(again, 2)[1] != checksum

    def test_pages_that_are_not_there_and_wrong_sizes_are_our_bugs(self, pool: PoolFile):
        for page in (-1, 5):
            with pytest.raises(IndexError):
                write(pool, page, page_of(0))
            with pytest.raises(IndexError):
                read(pool, page)
        with pytest.raises(ValueError):
            write(pool, 0, page_of(0)[:-1])
        with pytest.raises(ValueError):
            pool.read_pages(0, np.empty(PAGE_BYTES + 1, np.uint8))

    def test_neighbours_are_written_and_read_in_one_go(self, pool: PoolFile):
        together = np.concatenate([page_of(1), page_of(2), page_of(3)])
        checksums = pool.write_pages(1, together)
        assert checksums == [xxhash.xxh3_64_intdigest(page_of(page)) for page in (1, 2, 3)]
        out = np.empty_like(together)
        assert pool.read_pages(1, out) == checksums
        assert (out == together).all()
        assert not read(pool, 0)[0].any()
        assert not read(pool, 4)[0].any()
        with pytest.raises(IndexError):
            pool.write_pages(3, together)

    def test_many_threads_on_different_pages(self, pool: PoolFile):
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(4) as threads:
            sums = list(threads.map(lambda i: write(pool, i % 5, page_of(i % 5)), range(100)))
        assert all(read(pool, page)[1] == sums[page] for page in range(5))


class TestReuse:
    def test_the_same_geometry_keeps_pool_and_pages(self, path: Path):
        with PoolFile.open(path, **GEOMETRY) as first:
            checksum = write(first, 0, page_of(0))
        with PoolFile.open(path, **GEOMETRY) as second:
            assert (second.pool_id, second.replaced) == (first.pool_id, None)
            assert read(second, 0)[1] == checksum

    @pytest.mark.parametrize(
        "change",
        [
            {"num_pages": 6}, {"num_pages": 4}, {"page_shape": (3, 2, 16, 4, 4)}, {"dtype": "bfloat16"},
            {"model_fingerprint": "model-b"},
        ],
    )  # fmt: skip
    def test_another_one_gets_a_new_pool(self, path: Path, change: dict[str, Any]):
        with PoolFile.open(path, **GEOMETRY) as first:
            write(first, 0, page_of(0))
        with PoolFile.open(path, **{**GEOMETRY, **change}) as second:
            assert second.pool_id != first.pool_id
            assert second.replaced
            out = np.ones(second.page_bytes, np.uint8)
            second.read_pages(0, out)
            assert not out.any()
        assert os.listdir(path.parent) == ["pool.safetensors"]

    @pytest.mark.parametrize("damage", ["empty", "short", "long", "header"])
    def test_a_damaged_one_is_replaced(self, path: Path, damage: str):
        with PoolFile.open(path, **GEOMETRY) as first:
            pass
        data = path.read_bytes()
        path.write_bytes({"empty": b"", "short": data[:-1], "long": data + b"x", "header": b"\x07" + data[1:]}[damage])
        with PoolFile.open(path, **GEOMETRY) as second:
            assert second.pool_id != first.pool_id
            assert second.replaced

    def test_somebody_elses_file_is_never_overwritten(self, path: Path):
        from safetensors.numpy import save_file

        save_file({"weights": np.ones(10, np.float32)}, path)
        before = path.read_bytes()
        with pytest.raises(NotAPool, match="not a Midsentence pool"):
            PoolFile.open(path, **GEOMETRY)
        assert path.read_bytes() == before

    def test_links_and_directories_are_refused(self, tmp_path: Path, path: Path):
        target = tmp_path / "target"
        with PoolFile.open(target, **GEOMETRY):
            pass
        path.symlink_to(target)
        with pytest.raises(PoolError, match="symbolic"):
            PoolFile.open(path, **GEOMETRY)
        with pytest.raises(PoolError):
            PoolFile.open(tmp_path, **GEOMETRY)
        with pytest.raises(PoolError, match="directory must be there"):
            PoolFile.open(tmp_path / "nowhere" / "pool.safetensors", **GEOMETRY)

    def test_half_made_files_of_the_dead_are_cleared(self, path: Path):
        stale = path.with_name(".pool.safetensors.0badc0de.tmp")
        stale.write_bytes(b"half")
        with PoolFile.open(path, **GEOMETRY):
            assert os.listdir(path.parent) == ["pool.safetensors"]


HOLD = """
import sys, time
from pathlib import Path
from storage.pool_file import PoolFile
pool = PoolFile.open(Path(sys.argv[1]), num_pages=5, page_shape=(3, 2, 16, 2, 8), dtype="float32", model_fingerprint="model-a")
print(pool.pool_id, flush=True)
time.sleep(60)
"""


class TestLock:
    def test_exclusive_between_processes_and_gone_with_the_holder(self, path: Path):
        with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            pool_id = holder.stdout.readline().strip()
            with pytest.raises(PoolLocked, match=r"pool\.safetensors"):
                PoolFile.open(path, **GEOMETRY)
            with pytest.raises(PoolLocked):  # nor may it be replaced
                PoolFile.open(path, **{**GEOMETRY, "num_pages": 9})
            assert read_pool_header(path).pool_id == pool_id
            holder.kill()
            with PoolFile.open(path, **GEOMETRY, lock_wait=10) as pool:
                assert pool.pool_id == pool_id

    def test_many_at_once_make_one_pool(self, path: Path):
        holders = [
            subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(4)
        ]
        try:
            ends = [holder.stdout.readline() for holder in holders if holder.stdout is not None]
            winners = [line.strip() for line in ends if line]
            assert winners == [read_pool_header(path).pool_id]
            assert os.listdir(path.parent) == ["pool.safetensors"]
        finally:
            for holder in holders:
                holder.kill()
                holder.communicate()

    def test_closing_gives_it_up_twice_is_once(self, path: Path):
        pool = PoolFile.open(path, **GEOMETRY)
        pool.close()
        pool.close()
        PoolFile.open(path, **GEOMETRY).close()

    def test_a_child_inherits_nothing(self, pool: PoolFile):
        code = "import os; print(len([fd for fd in os.listdir('/proc/self/fd')]))"
        here = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert int(here) <= 5

    def test_a_file_put_in_its_place_while_waiting_is_the_one_that_counts(self, path: Path):
        first = PoolFile.open(path, **GEOMETRY)
        os.unlink(path)
        with PoolFile.open(path, **GEOMETRY) as second:
            assert second.pool_id != first.pool_id
        first.close()


class TestDisk:
    def test_too_large_names_needed_and_free_bytes(self, path: Path):
        with pytest.raises(PoolError, match=r"needs \d{15,} bytes, .* has \d+ free"):
            PoolFile.open(path, **{**GEOMETRY, "num_pages": 10**12})
        assert os.listdir(path.parent) == []

    def test_a_full_disk_leaves_nothing_behind(self, path: Path):
        def full(fd: int, offset: int, length: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.raises(PoolError, match="free") as caught:
            PoolFile.open(path, **GEOMETRY, disk=Disk(fallocate=full))
        assert "free space" in caught.value.hint
        assert os.listdir(path.parent) == []

    def test_the_old_pool_stays_when_the_new_one_does_not_fit(self, path: Path):
        with PoolFile.open(path, **GEOMETRY) as first:
            pass
        with pytest.raises(PoolError):
            PoolFile.open(path, **{**GEOMETRY, "num_pages": 10**12})
        assert read_pool_header(path).pool_id == first.pool_id
        PoolFile.open(path, **GEOMETRY).close()

    def test_a_small_tmpfs(self, tmp_path: Path):
        mount = tmp_path / "small"
        mount.mkdir()
        if os.geteuid() != 0:
            pytest.skip("mounting a tmpfs needs root")
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        if mounted.returncode:
            pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
        try:
            path = mount / "pool.safetensors"
            with pytest.raises(PoolError, match="needs"):
                PoolFile.open(path, **{**GEOMETRY, "num_pages": 200})
            assert os.listdir(mount) == []
            with PoolFile.open(path, **GEOMETRY) as pool:
                (mount / "filler").write_bytes(bytes((1 << 20) - pool.header.file_bytes - 8192))
                checksum = write(pool, 0, page_of(0))  # its blocks are its own: no ENOSPC, no SIGBUS
                assert read(pool, 0)[1] == checksum
        finally:
            subprocess.run(["umount", "-l", str(mount)], check=True)

    @pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
    def test_errors_of_single_pages_are_pool_errors(self, path: Path, number: int):
        def fail(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        with PoolFile.open(path, **GEOMETRY):
            pass
        with PoolFile.open(path, **GEOMETRY, disk=Disk(pwrite=fail, preadv=fail)) as pool:
            for attempt in (lambda: write(pool, 0, page_of(0)), lambda: read(pool, 0), lambda: pool.zero_page(0)):
                with pytest.raises(PoolError, match=os.strerror(number)):
                    attempt()

    def test_short_writes_and_reads_are_continued(self, path: Path):
        def little(fd: int, data: memoryview, offset: int) -> int:
            return os.pwrite(fd, data[:1000], offset)

        def some(fd: int, buffers: list[memoryview], offset: int) -> int:
            return os.preadv(fd, [buffers[0][:777]], offset)

        with PoolFile.open(path, **GEOMETRY, disk=Disk(pwrite=little, preadv=some)) as pool:
            checksum = write(pool, 1, page_of(1))
            data, found = read(pool, 1)
            assert checksum == found
            assert (data == page_of(1)).all()

    def test_a_file_cut_under_us_is_an_error_of_reading(self, pool: PoolFile, path: Path):
        os.truncate(path, pool.header.file_bytes - 10)
        with pytest.raises(PoolError, match="ends inside page 4"):
            read(pool, 4)

    def test_one_failed_sync_poisons_for_good(self, path: Path):
        failures = [OSError(errno.EIO, "I/O error")]

        def sync(fd: int) -> None:
            if failures:
                raise failures.pop()

        with PoolFile.open(path, **GEOMETRY, disk=replace(DISK, fdatasync=sync)) as pool:
            pool.sync([])
            assert not pool.poisoned
            for _ in range(2):  # the second call would succeed, though nothing was written again
                with pytest.raises(PoolError):
                    pool.sync([1])
            assert pool.poisoned


class TestHeader:
    def good(self) -> tuple[bytes, int]:
        header, head = pool_header.build(pool_id="p" * 32, **GEOMETRY)
        return head[8:], header.file_bytes

    def changed(self, **changes: Any) -> bytes:
        values = json.loads(self.good()[0])
        for name, value in changes.items():
            part, _, key = name.partition("__")
            values[{"meta": "__metadata__", "tensor": "kv_pages"}[part]][key] = value
        return json.dumps(values).encode().ljust(len(self.good()[0]))

    def test_a_good_one(self):
        text, size = self.good()
        header = pool_header.parse(text, size)
        assert (header.num_pages, header.page_bytes, header.data_offset) == (5, PAGE_BYTES, 4096)

    @pytest.mark.parametrize(
        "changes",
        [
            {"tensor__dtype": "F16"}, {"tensor__dtype": "I8"}, {"tensor__shape": [4, 3, 2, 16, 2, 8]}, {"tensor__shape": []},
            {"tensor__shape": [5, 3, 2, 16, 2, -8]}, {"tensor__shape": [True, 3, 2, 16, 2, 8]}, {"tensor__shape": "x"},
            {"tensor__data_offsets": [0, 1]}, {"tensor__data_offsets": [4, 30724]}, {"tensor__data_offsets": None},
            {"meta__pool_id": ""}, {"meta__num_pages": "6"}, {"meta__page_shape": "[1]"}, {"meta__dtype": "float64"},
            {"meta__num_pages": 5}, {"tensor__more": 1}, {"tensor__data_offsets": [False, 30720.0]},
            {"meta__pool_id": "\ud800"}, {"meta__model_fingerprint": "a\nb"},
        ],
    )  # fmt: skip
    def test_contradictions_are_refused(self, changes: dict[str, Any]):
        with pytest.raises(PoolError):
            pool_header.parse(self.changed(**changes), self.good()[1])

    def test_duplicate_keys_are_refused_though_the_library_takes_them(self):
        text, size = self.good()
        doubled = text.replace(b'{"__metadata__"', b'{"kv_pages":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"__metadata__"')
        with pytest.raises(PoolError, match="twice"):
            pool_header.parse(doubled[: len(text)].ljust(len(text)), size)

    def test_unknown_versions_are_refused_not_replaced(self):
        with pytest.raises(NotAPool, match="version"):
            pool_header.parse(self.changed(meta__version="2"), self.good()[1])

    @pytest.mark.parametrize("length", [0, 1, 2**63, 64 * 1024 + 1, 4089])
    def test_absurd_lengths(self, length: int):
        with pytest.raises(PoolError):
            pool_header.header_length(length.to_bytes(8, "little"), 4096)

    @pytest.mark.parametrize("bad", [b'{"a":' * 100_000, b'{"__metadata__":' + b"9" * 10_000 + b"}", b'{"a":NaN}', b"{\xff}"])
    def test_json_that_breaks_parsers(self, bad: bytes):
        with pytest.raises(PoolError):
            pool_header.parse(bad, 100)

    def test_a_geometry_that_holds_nothing_is_our_bug(self, path: Path):
        for change in ({"num_pages": 0}, {"page_shape": ()}, {"page_shape": (2, 0)}, {"dtype": "int8"}):
            with pytest.raises(ValueError):
                PoolFile.open(path, **{**GEOMETRY, **change})


def test_killed_in_the_middle_of_a_page_the_checksum_tells(path: Path):
    with PoolFile.open(path, **GEOMETRY) as pool:
        old = write(pool, 0, page_of(0))
    code = (
        "import numpy as np; from pathlib import Path; from storage.pool_file import PoolFile;"
        f"p = PoolFile.open(Path({str(path)!r}), **{GEOMETRY!r});"
        "p.write_pages(0, np.full(p.page_bytes, 7, np.uint8))"
    )
    environment = {**os.environ, "MIDSENTENCE_TESTING": "1", "MIDSENTENCE_FAILPOINTS": "pool.mid_write=kill"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == -9
    with PoolFile.open(path, **GEOMETRY) as pool:
        data, checksum = read(pool, 0)
    assert (data[: PAGE_BYTES // 2] == 7).all()
    assert (data[PAGE_BYTES // 2 :] == page_of(0)[PAGE_BYTES // 2 :]).all()
    assert checksum not in (old, xxhash.xxh3_64_intdigest(np.full(PAGE_BYTES, 7, np.uint8)))
