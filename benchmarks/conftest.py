"""``pytest benchmarks`` measures on the demo model; ``pytest benchmarks --quick`` only shows that everything runs."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness import PAGE_SIZE, Subject, make_jobs, paged, pages_needed
from engine import model_source

_TIMEOUT = 3600  #: seconds for one benchmark, all rounds of all sides


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="tiny model, few rounds: shows that all runs, figures mean nothing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(_TIMEOUT))


@pytest.fixture(scope="session")
def quick(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("quick"))


@pytest.fixture(scope="session")
def subject(quick: bool, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Warm: its kernels are compiled."""
    if quick:
        from tests.tiny_models import make_tiny_model

        folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=4096)
    else:
        folder = model_source.resolve("demo")
    subject = Subject.load(folder)
    with paged(subject, jobs := make_jobs(subject, [(PAGE_SIZE, PAGE_SIZE)]), sum(map(pages_needed, jobs)))() as run:
        run()
    return subject


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder on a disk: ``/tmp`` may be memory, ``/var/tmp`` is not."""
    with tempfile.TemporaryDirectory(prefix="midsentence-bench-", dir="/var/tmp") as name:
        yield Path(name)
