import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

import engine.threads  # noqa: F401  (before torch is loaded)
import tests.profiles  # noqa: F401  (registers them)
from tests.tiny_models import make_tiny_model

settings.load_profile("ci")


def pytest_configure(config):
    """``make sdk`` asks for another openai than the pinned one: no test may run with any but that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background; children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if folder := os.environ.get("SDK_FOLDER"):
        import openai

        if not Path(openai.__file__).is_relative_to(folder):
            raise pytest.UsageError(f"openai is imported from {openai.__file__}, not from SDK_FOLDER={folder}")


def pytest_report_header():
    if folder := os.environ.get("SDK_FOLDER"):
        import openai

        return f"openai {openai.__version__} from {folder}"
    return None


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_model(tiny_folder):
    from tests.rigs import load

    return load(tiny_folder)
