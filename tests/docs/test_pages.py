"""Pages that are made from the code are up to date, and none is left out of the index."""

import re

import pytest

from tests.docs.pages import DOCS, PAGES, metric_names


@pytest.mark.parametrize("name", PAGES)
def test_it_is_up_to_date(name):
    assert (DOCS / name).read_text() == PAGES[name](), "run python -m tests.docs.pages"


def test_every_metric_that_is_written_about_exists():
    known = set(metric_names())
    for page in DOCS.glob("*.md"):
        for found in re.findall(r"\bmidsentence_[a-z0-9_]+", page.read_text()):
            bare = re.sub(r"_(bucket|sum|count)$", "", found)
            assert found in known or bare in known, f"{page.name}: {found}"


def test_the_index_names_every_page_and_no_link_is_dead():
    index = (DOCS / "README.md").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name
    for page in DOCS.rglob("*.md"):
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#[^)]+)?\)", page.read_text()):
            place = (page.parent / target).resolve() if target else page
            assert place.exists(), f"{page.name}: {target}"
            if anchor and place.suffix == ".md":
                assert anchor[1:] in anchors_of(place), f"{page.name}: {target}{anchor}"


def anchors_of(page):
    """As GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
