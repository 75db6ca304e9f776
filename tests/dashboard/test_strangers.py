"""What the dashboard does with hostile text, with keys, and with engines that are several, silent or not there."""

import json

import pytest
from selenium.webdriver.common.keys import Keys

from service.api_keys import ApiKeys, add_key
from tests.dashboard.browser import needs_chromium
from tests.dashboard.conftest import check_conduct
from tests.service.api.conftest import new_memory_store
from tests.service.api.rig import ScriptedEngine, running_api, served_model

pytestmark = [needs_chromium, pytest.mark.timeout(180)]

HOSTILE = [
    "<script>window.pwned = 1</script>", "<img src=x onerror='window.pwned = 1'>", "</div><h1>gone</h1>", "&lt;b&gt;",
    "\N{RIGHT-TO-LEFT OVERRIDE}abc", "javascript:window.pwned=1", "\n\ndata: x\n\nid: 7\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from tests.tiny_models import MAX_CONTEXT, VOCAB_SIZE, _save_tokenizer

    folder = tmp_path_factory.mktemp("model")
    _save_tokenizer(folder)
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_CONTEXT, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return served_model(folder)


def ready(page):
    page.until(lambda: page.find("#main").is_displayed(), "an overview")


def test_what_a_model_writes_is_text_and_never_markup(model, open_page):
    store = new_memory_store()
    engine = ScriptedEngine(store)
    with running_api(store, model) as api:
        job_id = api.submit()
        engine.claim_one(job_id)
        engine.write(job_id, tokens=len(HOSTILE), texts=HOSTILE, end="stop")
        page = open_page(api.url)
        page.until(lambda: page.text("#live-state").startswith("completed"), "the end of the job")
        assert page.text("#text") == "".join(HOSTILE)
        assert page.js("return document.querySelector('#text').childElementCount") == 0
        assert page.js("return window.pwned") is None
        check_conduct(page)


def test_the_policy_holds(model, open_page):
    with running_api(new_memory_store(), model) as api:
        page = open_page(api.url)
        ready(page)
        inject = """const script = document.createElement("script");
            try { script.textContent = "window.pwned = 1"; document.body.append(script); } catch (refused) {}
            try { document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.pwned = 2'>"); } catch (refused) {}
            return window.pwned"""
        assert page.js(inject) is None
        reach = "return fetch('http://127.0.0.2:9/').then(() => 'reached', (error) => error.name)"
        assert page.js(reach) == "TypeError"
        told = page.complaints()
        assert any("Content Security Policy" in line and "connect-src" in line for line in told)
        assert any("TrustedScript" in line or "TrustedHTML" in line for line in told)


def test_a_key_is_asked_for_kept_in_the_tab_and_sent_in_no_address(model, open_page, tmp_path):
    store, keys_file = new_memory_store(), tmp_path / "keys"
    alice, bob = (add_key(keys_file, name) for name in ("alice", "bob"))
    engine = ScriptedEngine(store)
    with running_api(store, model, keys=ApiKeys(keys_file)) as api:
        jobs = {}
        for name, key in (("alice", alice), ("bob", bob)):
            answer = api.client.post(
                "/v1/jobs", json={"prompt": [5, 6], "max_tokens": 8}, headers={"Authorization": f"Bearer {key}"}
            )
            jobs[name] = answer.json()["id"]
            engine.claim_one(jobs[name])
        engine.write(jobs["alice"], tokens=2, texts=["of ", "alice"], end="stop")
        engine.write(jobs["bob"], tokens=2, texts=["of ", "bob"], end="stop")
        page = open_page(api.url)
        page.until(lambda: page.find("#key").is_displayed(), "the question for a key")
        assert not page.find("#main").is_displayed()
        page.find("#key-input").send_keys("ms-wrong", Keys.ENTER)
        page.until(lambda: "needs an API key" in page.text("#key-problem"), "a refusal")
        page.find("#key-input").send_keys(alice, Keys.ENTER)
        ready(page)
        page.until(lambda: page.text("#text") == "of alice", "the text")
        assert [row.get_attribute("data-job") for row in page.all("[data-job]")] == [jobs["alice"]]
        assert page.js("return Object.values(sessionStorage)") == [alice]
        assert page.js("return [localStorage.length, document.cookie]") == [0, ""]
        page.driver.refresh()
        ready(page)  # the tab still knows it
        page.note_requests()
        assert len(page.urls) > 8
        assert not [url for url in page.urls if alice in url]
        assert jobs["bob"] not in page.driver.page_source
        keys_file.write_text("")  # revoked: the list of jobs asks every two seconds
        page.until(lambda: page.find("#key").is_displayed(), "the question again")
        assert page.js("return sessionStorage.length") == 0


def test_no_engine_several_and_one_that_falls_silent(model, open_page):
    store = new_memory_store()
    with running_api(store, model, poll_interval=0.3, lease_seconds=6.0) as api:
        page = open_page(api.url)
        ready(page)
        assert page.find("#no-engine").is_displayed()
        assert page.text("#health") == "No engine"
        assert not page.find("#demo").is_displayed()
        first, second = ScriptedEngine(store), ScriptedEngine(store, "engine-2")

        def tell(*engines):
            for number, engine in enumerate(engines):
                engine.beat()
                engine.tell(f"{10 + number}.2oS", "20.P")
            return True

        page.until(lambda: tell(first, second) and len(page.all("[data-engine]")) == 2, "both engines")
        page.until(
            lambda: tell(first, second) and "10 free" in page.text("[data-engine='engine-1'] .legend") and "11 free" in
            page.text("[data-engine='engine-2'] .legend"), "both maps",
        )  # fmt: skip
        assert page.text("#health") == "Engine living"
        page.until(lambda: tell(first) and "silent since" in page.text("[data-engine='engine-2'] h3"), "that the second is silent")
        page.until(lambda: tell(first) and page.all("[data-engine='engine-2'] .stale"), "its map in grey")
        assert not page.all("[data-engine='engine-1'] .stale")
        assert "11 free" in page.text("[data-engine='engine-2'] .legend")  # what was known last
        page.until(lambda: tell(first) and "dead" in page.text("[data-engine='engine-2'] h3"), "that it is dead")
        assert page.all("#timeline [data-kind='engine_taken_over']")
        check_conduct(page)
