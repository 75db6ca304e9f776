"""Hypothesis profiles: ``ci`` (the default) runs the same examples every time; ``more`` runs ten times as many, new ones each time.

    pytest tests/storage/test_agreement.py --hypothesis-profile=more --hypothesis-seed=7

A seed means nothing under ``ci``, whose examples follow from the test's own source.
"""

from hypothesis import settings

_CI_EXAMPLES = 100

settings.register_profile("ci", max_examples=_CI_EXAMPLES, deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile("more", max_examples=10 * _CI_EXAMPLES, deadline=None, print_blob=True)


def examples(in_ci: int) -> int:
    """``in_ci`` examples under ``ci``, in proportion more under ``more``: for a test with a budget of its own."""
    return in_ci * settings().max_examples // _CI_EXAMPLES
