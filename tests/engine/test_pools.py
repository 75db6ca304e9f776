"""The device pool's memory: zeros, found as it is touched, or all of it when asked; and what a dead process leaves of it."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from engine import pool_memory
from engine.geometry import PageGeometry
from engine.pools import DevicePool

PAGES = 512


@pytest.fixture
def geometry():
    return PageGeometry(num_layers=4, page_size=16, num_kv_heads=4, head_dim=32, dtype="float32")


def resident(pool):
    """Bytes of the pool's mapping that are in memory."""
    begin = pool.tensor.data_ptr()
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(part, 16) for part in head.split("-"))
            inside = first <= begin < last
        elif inside and head == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("the pool is mapped nowhere")


def test_a_new_pool_is_zeros_and_costs_nothing_until_it_is_touched(geometry):
    pool = DevicePool(PAGES, geometry)
    size = PAGES * geometry.page_bytes
    assert resident(pool) < size // 4
    pool.tensor[7] = 1.0
    assert resident(pool) < size // 4
    assert int(torch.count_nonzero(pool.tensor)) == pool.tensor[7].numel()


def test_claimed_memory_is_there_and_what_was_written_stays(geometry):
    pool = DevicePool(PAGES, geometry)
    pool.tensor[7] = 3.0
    thread = threading.Thread(target=pool.claim_memory)
    thread.start()
    for _ in range(50):  # while it is claimed
        pool.tensor[PAGES - 1] += 1.0
    thread.join()
    assert resident(pool) >= PAGES * geometry.page_bytes
    assert bool((pool.tensor[7] == 3.0).all())
    assert bool((pool.tensor[PAGES - 1] == 50.0).all())
    assert int(torch.count_nonzero(pool.tensor)) == 2 * pool.tensor[7].numel()


MAKER = """
import sys, time
from engine.geometry import PageGeometry
from engine.pools import DevicePool
pool = DevicePool(int(sys.argv[1]), PageGeometry(num_layers=4, page_size=16, num_kv_heads=4, head_dim=32, dtype="float32"))
pool.tensor[7] = 3.0
print("made", flush=True)
time.sleep(600)
"""


@pytest.fixture
def maker():
    with subprocess.Popen([sys.executable, "-c", MAKER, str(PAGES)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"made\n"
        yield process
        process.kill()


def test_memory_outlives_its_maker_where_another_holds_it(maker, geometry):
    memory = pool_memory.share(pool_memory.of_process(maker.pid))
    claiming = threading.Thread(target=pool_memory.claim, args=[memory])
    claiming.start()
    claiming.join()
    maker.kill()
    maker.wait()
    pool = DevicePool(PAGES, geometry, memory=memory)
    assert bool((pool.tensor[7] == 3.0).all())
    assert int(torch.count_nonzero(pool.tensor)) == pool.tensor[7].numel()
    assert resident(pool) >= PAGES * geometry.page_bytes
    assert pool_memory.of_process(maker.pid) is None


def test_a_pool_of_another_size_has_memory_of_its_own(maker, geometry):
    memory = pool_memory.share(pool_memory.of_process(maker.pid))
    pool = DevicePool(PAGES + 1, geometry, memory=memory)
    assert int(torch.count_nonzero(pool.tensor)) == 0
    pool.tensor[7] = 5.0
    assert bool((DevicePool(PAGES, geometry, memory=memory).tensor[7] == 3.0).all())


def test_where_the_kernel_has_no_nameless_files_a_pool_is_plain_memory(geometry, monkeypatch):
    def refuse(*_):
        raise PermissionError("vm.memfd_noexec")

    monkeypatch.setattr(os, "memfd_create", refuse)
    pool = DevicePool(PAGES, geometry)
    pool.tensor[7] = 1.0
    thread = threading.Thread(target=pool.claim_memory)
    thread.start()
    thread.join()
    assert int(torch.count_nonzero(pool.tensor)) == pool.tensor[7].numel()
    assert resident(pool) >= PAGES * geometry.page_bytes
