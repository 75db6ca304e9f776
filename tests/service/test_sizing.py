"""How many pages fit, and what is said when more are asked for than there is memory."""

import pytest

from service import sizing
from service.errors import LimitTooLow

PAGE = 720 << 10


def test_what_never_fits_is_refused_with_both_sizes():
    fits = sizing.memory_limit() // PAGE
    sizing.check_device_pages(fits, PAGE)
    with pytest.raises(LimitTooLow, match=rf"{2 * fits} device pages of 720 KiB are \d+ MiB; there are \d+ .*fewer --device-pages"):
        sizing.check_device_pages(2 * fits, PAGE)


def test_an_accelerator_has_its_own_memory():
    sizing.check_device_pages(10, PAGE, device_free=10 * PAGE)
    with pytest.raises(LimitTooLow, match="11 device pages"):
        sizing.check_device_pages(11, PAGE, device_free=10 * PAGE)
