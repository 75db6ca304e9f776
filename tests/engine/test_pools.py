"""The device pool's memory: zeros, found as it is touched, or all of it when asked."""

import threading
from pathlib import Path

import pytest
import torch

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
