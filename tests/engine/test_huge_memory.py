"""Memory for pools: zeros, there at once, in huge pages where the kernel has them."""

import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.huge_memory import zeros
from engine.pools import DevicePool
from tests.engine.test_residency import GEOMETRY

needs_smaps = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/smaps is Linux'")


def mapping_of(array):
    """What the kernel says of the mapping in which the array lies: fields of /proc/self/smaps, in KiB, and its flags."""
    address, inside = array.__array_interface__["data"][0], False
    fields = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside:
            name, _, value = line.partition(":")
            fields[name] = value.split()
    return fields


@pytest.mark.parametrize("num_bytes", [1, mmap.PAGESIZE, (5 << 20) + 3])
def test_zeros_that_can_be_written(num_bytes):
    memory = zeros(num_bytes, threads=2)
    assert (memory.dtype, memory.shape) == (np.uint8, (num_bytes,))
    assert not memory.any()
    memory[:] = 255
    assert memory.all()


@needs_smaps
def test_all_of_it_is_there_and_huge_pages_are_asked_for():
    found = mapping_of(memory := zeros(64 << 20, threads=2))
    assert int(found["Rss"][0]) >= len(memory) >> 10
    assert "hg" in found["VmFlags"]


def test_a_device_pool_lies_in_it():
    pool = DevicePool(4, GEOMETRY)
    assert not pool.tensor.any()
    assert (pool.tensor.dim(), pool.bytes.shape) == (6, (4, GEOMETRY.page_bytes))
    pool.tensor[2] = 1.0
    assert pool.bytes[2].any()
    assert not pool.bytes[3].any()


def test_more_than_there_is_is_said_at_once():
    with pytest.raises((OSError, OverflowError, MemoryError)):
        zeros(1 << 60, threads=2)
