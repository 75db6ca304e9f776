"""What the dashboard is told: engines, pages, what happened. Who may see it, who may kill, and what its files are sent with."""

import json
import re

import httpx
import pytest

from service.api.static import FILES, HEADERS
from service.api.timeline import Timeline
from service.api_keys import ApiKeys, add_key
from storage.errors import StoreUnavailable
from tests.service.api.conftest import new_memory_store
from tests.service.api.rig import DIRECT, ScriptedEngine, parse_events, running_api, until


class Viewer:
    """Reads the overview's events."""

    def __init__(self, api, **how):
        self.client = httpx.Client(base_url=api.url, timeout=20, **DIRECT, **how)

    def __enter__(self):
        self._stream = self.client.stream("GET", "/v1/overview/events")
        self.response = self._stream.__enter__()
        self.events = parse_events(self.response.iter_lines())
        return self

    def __exit__(self, *error):
        self._stream.__exit__(*error)
        self.client.close()

    def until(self, condition):
        for event in self.events:
            assert event.name == "overview"
            if condition(event.data):
                return event.data
        raise AssertionError("the stream ended")


def vitals(overview):
    """Of the one engine; None as long as it was not seen, or told nothing."""
    return overview["engines"][0]["vitals"] if overview["engines"] else None


def engines(api):
    return until(lambda: api.client.get("/v1/overview").json()["engines"])


def test_engines_are_asked_only_while_somebody_looks(api, engine):
    engine.beat()
    assert engine.tell("4.") == 0
    assert engines(api)[0]["vitals"] is None
    with Viewer(api) as viewer, Viewer(api) as other:
        until(lambda: engine.tell("2.oS", "3.P", tokens=7) == 1)  # one subscription, however many look
        for each in (viewer, other):
            seen = each.until(vitals)["engines"][0]
            assert (seen["id"], seen["device_pages"]) == ("engine-1", 64)
            assert (seen["vitals"]["device"], seen["vitals"]["host"], seen["vitals"]["totals"]["tokens"]) == ("2.oS", "3.P", 7)
    until(lambda: engine.tell("4.") == 0, 20)
    with Viewer(api) as viewer:  # and again
        until(lambda: engine.tell("3.o") == 1)
        viewer.until(lambda overview: vitals(overview)["device"] == "3.o")


def test_a_new_life_is_not_shown_with_the_pages_of_the_last(api, engine):
    with Viewer(api) as viewer:
        viewer.until(lambda overview: engine.tell("2.oS") and vitals(overview))
        engine.register()
        seen = viewer.until(lambda overview: overview["engines"][0]["incarnation"] == engine.incarnation)
        assert seen["engines"][0]["vitals"] is None


def test_deaths_and_recoveries_are_remembered(api, engine):
    engine.beat()
    engines(api)
    engine.register()
    with Viewer(api) as viewer:

        def recovered(overview):
            engine.tell(".", recovered=2, pages_restored=11, tokens_replayed=23)
            return any(moment["kind"] == "jobs_recovered" for moment in overview["timeline"])

        told = viewer.until(recovered)
    kinds = [moment["kind"] for moment in told["timeline"]]
    assert [kind for kind in kinds if kind != "engine_started"][-2:] == ["engine_silent", "jobs_recovered"]
    last = told["timeline"][-1]
    assert (last["jobs"], last["pages_restored"], last["tokens_replayed"]) == (2, 11, 23)


def test_redis_away_is_told_and_so_is_its_return(api):
    api.source.error = StoreUnavailable("connection refused at /secret/path")
    away = until(lambda: (seen := api.client.get("/v1/overview").json())["store_away_since"] and seen)
    assert "secret" not in json.dumps(away)
    api.source.error = None
    back = until(lambda: (seen := api.client.get("/v1/overview").json())["store_away_since"] is None and seen)
    assert [moment["kind"] for moment in back["timeline"]][-2:] == ["store_away", "store_back"]


def test_a_viewer_has_to_come_again(model):
    with running_api(new_memory_store(), model, overview_seconds=0.3) as api, Viewer(api) as viewer:
        assert len(list(viewer.events)) >= 2


def test_viewers_end_with_a_drain(memory_api):
    with Viewer(memory_api) as viewer:
        next(viewer.events)
        memory_api.drain()
        list(viewer.events)  # ends


def test_a_tenant_sees_numbers_and_nobodys_jobs(model, tmp_path):
    store, keys_file = new_memory_store(), tmp_path / "keys"
    alice, bob = (add_key(keys_file, name) for name in ("alice", "bob"))
    engine = ScriptedEngine(store)
    with running_api(store, model, keys=ApiKeys(keys_file)) as api:
        made = api.client.post("/v1/jobs", json={"prompt": [5, 6], "max_tokens": 8}, headers={"Authorization": f"Bearer {alice}"})
        job_id = made.json()["id"]
        engine.claim_one(job_id)
        engine.write(job_id, tokens=2)
        with Viewer(api, headers={"Authorization": f"Bearer {bob}"}) as viewer:
            until(lambda: engine.tell("2.oS") == 1)
            seen = viewer.until(lambda overview: vitals(overview) and overview["jobs"]["in_progress"] == 1)
    text = json.dumps(seen)
    assert job_id not in text
    assert "alice" not in text
    assert "t0" not in text
    assert seen["engines"][0]["jobs"] == 1


# --- timeline -------------------------------------------------------------------------------------------------------------


class Watched:
    """A timeline over engines whose beats and clock the test moves."""

    def __init__(self):
        self.now, self.store = 1000.0, new_memory_store()
        self.timeline = Timeline(lambda: self.now)
        self.engine = ScriptedEngine(self.store)

    def second(self, *, beat=True):
        self.now += 1.0
        if beat:
            self.engine.beat()
        self.timeline.looked(tuple(self.store.engines()))

    @property
    def told(self):
        return [(moment["kind"], moment["at"] - 1000, moment["seconds"]) for moment in self.timeline.moments()[1:]]


def test_an_engine_that_falls_silent_is_told_from_its_last_beat_on():
    watched = Watched()
    watched.second()
    for _ in range(3):
        watched.second(beat=False)
    assert watched.told == []  # a beat may be late
    watched.second(beat=False)
    assert watched.told == [("engine_silent", 1, None)]
    watched.second()
    assert watched.told[-1] == ("engine_back", 6, 5)


def test_a_new_life_tells_of_the_death_before_it():
    watched = Watched()
    watched.second()
    watched.now += 1.5
    watched.engine.register()
    watched.second()
    assert watched.told == [("engine_silent", 1, None), ("engine_started", 3.5, 2.5)]
    assert watched.timeline.silent_seconds("engine-1") == 0


def test_nobody_is_blamed_for_an_outage_of_the_store():
    watched = Watched()
    watched.second()
    watched.timeline.could_not_look()
    watched.now += 60
    watched.timeline.could_not_look()
    assert watched.timeline.store_away_since == 1001
    watched.second(beat=False)
    assert [kind for kind, *_ in watched.told] == ["store_away", "store_back"]


def test_a_take_over_is_told_once_whoever_did_it():
    watched = Watched()
    watched.second()
    (record,) = watched.store.engines()
    watched.store.take_over("engine-1", record.incarnation, record.beat)
    watched.second(beat=False)
    watched.timeline.taken_over("engine-1", 3)  # by us, which the next look finds done
    watched.second(beat=False)
    assert [kind for kind, *_ in watched.told] == ["engine_taken_over", "engine_taken_over"]
    watched.second(beat=False)
    assert len(watched.told) == 2


def test_it_forgets_the_oldest():
    watched = Watched()
    for number in range(300):
        watched.timeline.taken_over(f"engine-{number}", 1)
    assert len(watched.timeline.moments()) == 100
    assert watched.timeline.moments()[-1]["engine_id"] == "engine-299"


# --- the button -----------------------------------------------------------------------------------------------------------

PRESS = {"X-Midsentence-Demo": "kill-engine"}


def test_without_a_demo_there_is_no_button(memory_api):
    assert memory_api.client.post("/v1/demo/kill-engine", headers=PRESS).status_code == 404
    assert memory_api.client.get("/v1/overview").json()["demo_controls"] is False


def test_only_our_own_page_on_this_machine_can_press_it(model):
    kills = []
    with running_api(new_memory_store(), model, kill_engine=lambda: kills.append(1)) as api:
        for headers in ({}, {"X-Midsentence-Demo": "yes"}, {**PRESS, "Host": "evil.example"}, {**PRESS, "Host": "10.0.0.7"}):
            refused = api.client.post("/v1/demo/kill-engine", headers=headers)
            assert (refused.status_code, refused.json()["param"]) == (400, "X-Midsentence-Demo")
        asked = api.client.options("/v1/demo/kill-engine", headers={"Origin": "http://evil.example"})
        assert "Access-Control-Allow-Origin" not in asked.headers
        assert api.client.get("/v1/demo/kill-engine", headers=PRESS).status_code == 405
        assert kills == []
        assert api.client.post("/v1/demo/kill-engine", headers=PRESS).status_code == 202
        assert kills == [1]
        assert api.client.get("/v1/overview").json()["timeline"][-1]["kind"] == "engine_killed"


# --- files ----------------------------------------------------------------------------------------------------------------


def test_files_load_nothing_from_elsewhere_and_run_nothing_inline(memory_api):
    assert {"/", "/dashboard/main.js", "/dashboard/style.css", "/dashboard/favicon.svg"} <= FILES.keys()
    for path, (kind, content) in FILES.items():
        answer = memory_api.client.get(path)
        assert (answer.status_code, answer.content) == (200, content)
        assert answer.headers["Content-Type"].startswith(kind)
        assert HEADERS.items() <= {name: answer.headers.get(name) for name in HEADERS}.items()
        assert memory_api.client.head(path).status_code == 200
        text = content.decode()
        addresses = set(re.findall(r"https?://[^\s\"']+", text)) - {"http://www.w3.org/2000/svg"}
        assert addresses == set(), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\son\w+=|<style|style=", text), path
    assert "<script>" not in memory_api.client.get("/").text


@pytest.mark.parametrize("directive", ["default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"])
def test_the_policy_allows_our_own_files_alone(directive):
    assert directive in HEADERS["Content-Security-Policy"]
    assert "unsafe" not in HEADERS["Content-Security-Policy"]
