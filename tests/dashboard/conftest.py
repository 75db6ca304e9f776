"""A real ``serve`` of a tiny model with the demo's controls, slowed down to the speed of a large one, and a browser on it."""

import contextlib

import httpx
import pytest

from chaos.cluster import Cluster
from chaos.place import ClusterOptions
from tests.dashboard.browser import browser

STEP = 0.04  #: seconds
PROMPT = "Once upon a time there was a small model"


class Demo(Cluster):
    def _serve_command(self):
        return [*super()._serve_command(), "--demo-controls"]

    def client(self):
        return httpx.Client(base_url=self.url, timeout=30, trust_env=False)

    def submit(self, tokens, seed=1):
        body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "seed": seed}
        with self.client() as client:
            return client.post("/v1/jobs", json=body).json()["id"]

    def job(self, job_id):
        with self.client() as client:
            return client.get(f"/v1/jobs/{job_id}").json()

    def metric(self, name):
        answer = httpx.get(f"http://127.0.0.1:{self.main.port}/metrics", trust_env=False)
        (line,) = (line for line in answer.text.splitlines() if line.startswith(f"midsentence_{name} "))
        return float(line.split()[1])


@pytest.fixture(scope="session")
def demo(tiny_folder, tmp_path_factory):
    slow = {"failpoints": f"worker.after_step=sleep:{STEP}@*"}
    with Demo(tmp_path_factory.mktemp("demo"), ClusterOptions(str(tiny_folder), settings=slow)) as cluster:
        cluster.serve()
        yield cluster
        assert cluster.stop() == 0


@pytest.fixture
def page(demo):
    """Left as it must be whatever was done: without a complaint, and without a word to anybody else."""
    with browser(demo.url) as made:
        made.open().until(lambda: made.find("#main").is_displayed(), "an overview")
        yield made
        check_conduct(made)


def check_conduct(page):
    page.note_requests()
    assert page.hosts == {page.url.removeprefix("http://")}
    assert page.complaints() == []


@pytest.fixture
def open_page():
    """A browser on any server."""
    with contextlib.ExitStack() as stack:
        yield lambda url: stack.enter_context(browser(url)).open()
