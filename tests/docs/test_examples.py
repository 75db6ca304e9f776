"""The programs of docs/examples as they stand, against a real service whose processes are killed while they run."""

import contextlib
import inspect
import json
import os
import runpy
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from chaos.cluster import Cluster
from chaos.place import ClusterOptions, free_ports
from tests.dashboard.browser import browser, needs_chromium
from tests.docs.pages import DOCS
from tests.service.api.rig import until
from tests.tiny_models import make_tiny_model

EXAMPLES = DOCS / "examples"
ROLES = ("engine", "api", "redis")  #: in the order in which they are killed
STEP = 0.03  #: seconds: an api is back before a job of 300 tokens is over


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Slow, and of a model that talks until its tokens run out."""
    place = tmp_path_factory.mktemp("examples")
    model = make_tiny_model(place / "tiny", eos_token_id=None)
    slow = {"failpoints": f"worker.after_step=sleep:{STEP}@*"}
    with Cluster(place / "c", ClusterOptions(str(model), device_pages=400, host_pages=800, settings=slow)) as running:
        running.serve()
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="module")
def client(cluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=60, max_retries=20) as sdk:
        yield sdk


class Program:
    """A running example, and what it has written so far."""

    def __init__(self, cluster, place, *command):
        self._cluster = cluster
        self._files = [place / "stdout", place / "stderr"]
        place.mkdir()
        found_by = {"OPENAI_BASE_URL": f"{cluster.url}/v1", "OPENAI_API_KEY": "none", "MIDSENTENCE_URL": cluster.url}
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=os.environ | found_by, start_new_session=True
            )

    @property
    def output(self):
        """As it was written: a random model's text holds carriage returns, and what is being written may end amid a character."""
        return self._files[0].read_bytes().decode(errors="replace")

    @property
    def notes(self):
        return self._files[1].read_text()

    def live_through(self, progress, at):
        """Each role is killed once ``progress()`` has come so far again: the text goes on in between."""
        killed = []
        for role in ROLES:
            goal = progress() + at
            until(lambda goal=goal: progress() >= goal, 60)
            assert self.process.poll() is None, "it ended before the next kill"
            assert jobs(self._cluster, status="in_progress"), "its jobs ended before the next kill"
            killed.append(self._cluster.signal(role, signal.SIGKILL))
        return killed

    def end(self, code=0):
        assert self.process.wait(90) == code, self.notes
        return self.output


@pytest.fixture
def start(cluster, tmp_path):
    with contextlib.ExitStack() as ended:

        def run(*command, name="program"):
            program = Program(cluster, tmp_path / name, *command)
            ended.callback(program.process.wait)
            ended.callback(program.process.kill)
            return program

        yield run


def python(name):
    return sys.executable, str(EXAMPLES / name)


def jobs(cluster, **query):
    """None while the api is away."""
    with contextlib.suppress(httpx.TransportError, KeyError):
        return httpx.get(f"{cluster.url}/v1/jobs", params=query, trust_env=False, timeout=30).json()["data"]
    return []


def job(cluster, job_id):
    return httpx.get(f"{cluster.url}/v1/jobs/{job_id}", trust_env=False, timeout=30).json()


def test_every_example_is_in_the_index():
    index = (EXAMPLES / "README.md").read_text()
    programs = [file.name for file in EXAMPLES.iterdir() if file.is_file() and file.name != "README.md"]
    assert len(programs) > 6
    assert [name for name in programs if f"({name})" not in index] == []


def test_the_page_about_responses_shows_the_loop_of_the_example():
    loop = inspect.getsource(runpy.run_path(str(EXAMPLES / "resume.py"))["events"])
    assert f"```python\n{loop}```" in (DOCS / "responses.md").read_text()


def test_a_response_is_resumed(cluster, client, start):
    prompt = "A server wrote:"
    program = start(*python("resume.py"), prompt)
    program.live_through(lambda: len(program.output), 80)
    text = program.end()
    final = client.responses.retrieve(program.notes.split()[0])
    assert text == final.output_text
    assert final.to_dict()["recovery"]["count"] >= 1
    again = client.responses.create(input=prompt, max_output_tokens=300, extra_body={"seed": final.to_dict()["seed"]})
    assert text == again.output_text


def test_a_chat_is_told_again(cluster, client, start):
    program = start(*python("chat.py"))
    program.live_through(lambda: len(program.output), 80)
    text = program.end()
    completion_id, reason, tokens = program.notes.replace(":", "").split()[:3]
    assert (reason, int(tokens)) == ("length", 300)
    assert text == client.chat.completions.retrieve(completion_id).choices[0].message.content
    made = job(cluster, completion_id)
    assert text == made["output"]["text"]
    assert made["recovery"]["count"] >= 1
    assert [one.id for one in client.chat.completions.list()] == [completion_id], "one request, however often it was sent"


def test_a_batch_is_waited_for_and_found_again(cluster, client, start):
    cities = [f"city {number}" for number in range(110)]  # they end 32 at a time: a kill behind each of three such waves

    def completed():
        counts = [line.split()[2] for line in program.notes.splitlines() if " of " in line]
        return int(counts[-1]) if counts else 0

    program = start(*python("batch.py"), *cities)
    program.live_through(completed, 1)
    answers = program.end()
    lines = [json.loads(line) for line in answers.splitlines()]
    assert [line["custom_id"] for line in lines] == cities
    sent = client.files.content(client.batches.list().data[0].input_file_id).text.splitlines()
    with ThreadPoolExecutor(20) as pool:
        alone = list(pool.map(lambda line: client.chat.completions.create(**json.loads(line)["body"]), sent))
    assert [line["response"]["body"]["choices"][0]["message"]["content"] for line in lines] == [
        answer.choices[0].message.content for answer in alone
    ]
    again = start(*python("batch.py"), *cities, name="again")
    assert again.end() == answers
    assert len(client.batches.list().data) == 1


def test_objects_are_whole_objects(cluster, start):
    def tokens():
        return sum(one["usage"]["completion_tokens"] for one in jobs(cluster, status="in_progress"))

    program = start(*python("structured.py"), "Ada")
    until(lambda: tokens() > 5, 60)
    cluster.signal("engine", signal.SIGKILL)
    until(lambda: tokens() > 20, 60)
    cluster.signal("api", signal.SIGKILL)
    until(lambda: program.output, 60)
    until(lambda: tokens() > 5, 60)
    cluster.signal("redis", signal.SIGKILL)
    people = [json.loads(line) for line in program.end().splitlines()]
    assert len(people) == 2
    schema = runpy.run_path(str(EXAMPLES / "structured.py"))["Person"]
    for person in people:
        assert schema.model_validate(person).model_dump() == person
    objects = [one for one in jobs(cluster, limit=2) if one["recovery"]["count"]]
    assert objects, "a job that was cut amid its object"
    made = [job(cluster, one["id"])["output"]["text"] for one in jobs(cluster, limit=2)]
    assert sorted(map(json.dumps, map(json.loads, made))) == sorted(map(json.dumps, people)), "one job for each"


def test_curl_goes_on_behind_the_last_event(cluster, start):
    body = {"prompt": "Once upon a time", "max_tokens": 300, "seed": 5}

    def told(program):
        return [json.loads(line) for line in program.output.splitlines() if "index" in line]

    program = start("bash", str(EXAMPLES / "curl.sh"), json.dumps(body))
    program.live_through(lambda: program.output.count('"index"'), 30)
    program.end()
    events = told(program)
    assert [event["index"] for event in events] == list(range(300))
    assert job(cluster, program.notes.split()[0])["recovery"]["count"] >= 1
    undisturbed = start("bash", str(EXAMPLES / "curl.sh"), json.dumps(body), name="undisturbed")
    undisturbed.end()
    assert told(undisturbed) == events


@needs_chromium
def test_a_browser_goes_on_behind_the_last_event(cluster, start):
    (port,) = free_ports(1)
    command = (sys.executable, "-m", "uvicorn", "--app-dir", str(EXAMPLES), "events_server:app", "--port", str(port))
    program = start(*command)
    until(lambda: "running on" in program.notes, 60)
    with browser(f"http://127.0.0.1:{port}/") as page:
        page.open()
        page.js("window.sameDocument = true")
        page.find("button").click()
        program.live_through(lambda: len(page.text("#text")), 80)
        page.until(lambda: page.text("#state").endswith("incomplete"), "the end of the job", 60)
        made = job(cluster, page.text("#state").split()[0])
        assert page.text("#text") == "Once upon a time" + made["output"]["text"]
        assert made["recovery"]["count"] >= 1
        assert page.js("return window.sameDocument") is True
        page.note_requests()
        assert page.hosts == {f"127.0.0.1:{port}"}
    program.process.terminate()
    program.process.wait(20)
    assert "Traceback" not in program.notes
