import pytest

import engine.threads  # noqa: F401  (before torch is loaded)
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_model(tiny_folder):
    from tests.rigs import load

    return load(tiny_folder)
