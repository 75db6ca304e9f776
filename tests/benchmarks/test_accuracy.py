"""The accuracy of smaller formats is measured against itself first: no difference where nothing was made smaller."""

import numpy as np
import pytest

from benchmarks.accuracy import WINDOW, Variant, compare, score
from tests.tiny_models import VOCAB_SIZE


@pytest.fixture(scope="module")
def windows():
    return [np.random.default_rng(seed).integers(0, VOCAB_SIZE, WINDOW) for seed in range(2)]


def test_the_reference_agrees_with_itself_and_int8_does_not_quite(tiny_folder, windows):
    reference = score(tiny_folder, Variant("fp32", "float32"), windows)
    assert len(reference.likelihoods) == len(reference.likeliest) == 2 * (WINDOW - 1)
    itself = compare(score(tiny_folder, Variant("fp32", "float32"), windows), reference)
    assert (itself["agreement"], itself["divergence"]) == (1.0, 0.0)
    smaller = compare(score(tiny_folder, Variant("int8", "float32"), windows), reference)
    assert 0.5 < smaller["agreement"] < 1.0
    assert smaller["divergence"] > 0
    assert itself["perplexity"] == pytest.approx(np.exp(-reference.likelihoods.mean()))
