from hypothesis import given
from hypothesis import strategies as st

from engine.identity import page_identities, root_identity

ROOT = root_identity("model", "arithmetic")
SHAPE = {"page_size": 4, "prefill_chunk": 8}


def test_only_full_pages_have_an_identity():
    assert page_identities(ROOT, range(3), 3, **SHAPE) == []
    assert len(page_identities(ROOT, range(11), 3, **SHAPE)) == 2


def test_what_decides_bits_decides_the_identity():
    base = page_identities(ROOT, range(8), 8, **SHAPE)
    assert page_identities(root_identity("other", "arithmetic"), range(8), 8, **SHAPE) != base
    assert page_identities(root_identity("model", "other"), range(8), 8, **SHAPE) != base
    assert page_identities(root_identity("model", "arithmetic", "tenant"), range(8), 8, **SHAPE) != base
    assert page_identities(ROOT, [9, *range(1, 8)], 8, **SHAPE)[1] != base[1]  # an earlier token changes every later page
    # The same tokens, computed by a call of other shape: a 6-row chunk, or generated rows.
    assert page_identities(ROOT, range(8), 6, **SHAPE)[0] != base[0]
    assert page_identities(ROOT, range(8), 4, **SHAPE)[1] != base[1]


def test_pages_of_jobs_without_a_tenant_are_found_by_the_identity_they_always_had():
    """Another value would make every pool file in the field a heap of pages that nobody finds."""
    assert root_identity("model", "arithmetic") == "2a05f8161a3e7dd549b29d41cac665ed"


def test_a_longer_prompt_shares_the_pages_of_its_full_chunks_only():
    short = page_identities(ROOT, range(12), 12, **SHAPE)  # chunks of 8 and 4 rows
    long = page_identities(ROOT, range(16), 16, **SHAPE)  # chunks of 8 and 8 rows
    assert short[:2] == long[:2]
    assert short[2] != long[2]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=60), st.integers(0, 15), st.data())
def test_going_on_from_known_identities_gives_the_same(tokens, known, data):
    num_prompt = data.draw(st.integers(1, len(tokens)))
    whole = page_identities(ROOT, tokens, num_prompt, **SHAPE)
    assert page_identities(ROOT, tokens, num_prompt, **SHAPE, known=whole[:known]) == whole
