# test_page_manager.py
import pytest
from engine import PageManager

def test_allocate_and_free():
    """Pages should be correctly allocated and returned to the free pool."""
    manager = PageManager(total_pages=64)
    assert manager.free_count == 64

    pages = manager.allocate(10, "test_req")
    assert len(pages) == 10
    assert manager.free_count == 54
    assert manager.used_count == 10

    manager.free(pages)
    assert manager.free_count == 64
    assert manager.used_count == 0

def test_out_of_memory():
    """Allocating more pages than available should raise MemoryError."""
    manager = PageManager(total_pages=4)
    manager.allocate(4, "req1")
    with pytest.raises(MemoryError):
        manager.allocate(1, "req2")

def test_swap_updates_location():
    """Swapping should update page location tracking."""
    manager = PageManager(total_pages=32)
    pages = manager.allocate(4, "req1", location="gpu")
    for pid in pages:
        assert manager.page_location[pid] == "gpu"

    manager.swap_to(pages, target="cpu")
    for pid in pages:
        assert manager.page_location[pid] == "cpu"

if __name__ == "__main__":
    pytest.main([__file__, "-v"])
