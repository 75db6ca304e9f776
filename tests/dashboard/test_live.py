"""The dashboard on a real service, in a real browser: what it shows is so, and it outlives what it shows."""

import signal

import pytest
from selenium.webdriver.common.keys import Keys

from tests.dashboard.browser import DESKTOP, PHONE, needs_chromium

pytestmark = [needs_chromium, pytest.mark.timeout(300)]

PAGES = {"device": 160, "host": 480}  #: of chaos.place.ClusterOptions


def cells(page, job_id):
    """Of a job's row, by heading."""
    row = page.js(
        "return [...document.querySelector(`[data-job='${arguments[0]}']`)?.closest('tr').cells ?? []].map(c => c.textContent)",
        job_id,
    )
    return dict(zip(("job", "state", "tokens", "age", "recoveries"), row, strict=False))


def choose(page, job_id):
    button = page.until(lambda: page.all(f"[data-job='{job_id}']"), "the job in the list")[0]
    page.js("arguments[0].click()", button)


def tokens_of(page):
    """Tokens of the chosen job that the page has read."""
    return int(page.text("#live-state").split(",")[-1].split()[0]) if "token" in page.text("#live-state") else 0


def counts(page, pool):
    """What the legend of a map says, by letter."""
    found = page.js(
        """const items = document.querySelectorAll(`[data-pool='${arguments[0]}'] .legend li`);
        return [...items].map((item) => [item.dataset.letter, Number(item.dataset.count)])""",
        pool,
    )
    return dict(found)


def test_a_job_appears_and_its_text_grows_to_what_the_job_says(demo, page):
    job_id = demo.submit(120)
    choose(page, job_id)
    page.until(lambda: cells(page, job_id).get("state") == "in progress", "its state")
    sizes = []
    for _ in range(3):
        sizes.append(len(page.until(lambda: len(page.text("#text")) > max(sizes, default=0) and page.text("#text"), "more text")))
    page.until(lambda: page.text("#live-state").startswith("completed"), "its end")
    assert page.text("#text") == demo.job(job_id)["output"]["text"]
    assert sizes == sorted(set(sizes))
    page.until(lambda: cells(page, job_id)["state"] == "completed", "the end in the list")
    assert cells(page, job_id)["tokens"] == "120"


def used_by(page):
    """(device, host): the share of pages in use, by the maps' legends."""
    device, host = counts(page, "device"), counts(page, "host")
    if not device:
        return None
    assert (sum(device.values()), sum(host.values())) == (PAGES["device"], PAGES["host"])
    return sum(device.get(letter, 0) for letter in "oshlSH") / PAGES["device"], 1 - host.get(".", 0) / PAGES["host"]


def test_the_page_map_counts_what_the_engines_metrics_count(demo, page):
    """A map is a second or two old: while jobs run it lies among what the metrics said lately; at rest both say the same."""
    said, shown, some_pages = [demo.metric("kv_cache_usage_perc")], set(), 3 / PAGES["device"]
    jobs = [demo.submit(400, seed) for seed in (1, 2, 3)]
    while any(demo.job(job_id)["status"] != "completed" for job_id in jobs):
        said.append(demo.metric("kv_cache_usage_perc"))
        used = used_by(page)
        if used and used[0] > 0 and len(said) > 5:
            assert min(said[-100:]) - some_pages <= used[0] <= max(said[-100:]) + some_pages
            shown.add(used[0])
    assert len(shown) > 1  # or it was no look at what changes
    page.until(lambda: used_by(page) == pytest.approx((0, demo.metric("host_pool_usage_perc"))), "the same numbers at rest")
    assert used_by(page)[1] > 0
    assert counts(page, "device")["C"] > 0  # what they wrote is cache, and survives a crash
    spoken = page.find("[data-pool='device'] canvas").get_attribute("aria-label")
    assert f"{counts(page, 'device')['C']} cached, published" in spoken


def test_the_button_kills_the_engine_and_the_text_goes_on(demo, page):
    job_id = demo.submit(300)
    choose(page, job_id)
    page.until(lambda: tokens_of(page) > 60, "some text")
    before, seen = demo.require_pid("engine"), page.text("#text")
    page.find("#kill").send_keys(Keys.ENTER)
    demo.wait_changed("engine", before)
    page.until(lambda: page.all("#text .mark"), "a mark in the text", 60)
    page.until(lambda: page.text("#live-state").startswith("completed"), "the end of the job", 60)
    job = demo.job(job_id)
    assert page.text("#text") == job["output"]["text"]
    assert page.text("#text").startswith(seen)
    assert job["recovery"]["count"] == 1
    pages, tokens = job["recovery"]["pages_restored"], job["recovery"]["tokens_replayed"]
    assert pages > 0
    note = page.find("#text .mark").get_attribute("data-note")
    assert note.startswith(f"recovered: {pages} page")
    for kind in ("engine_killed", "engine_silent", "engine_started", "jobs_recovered"):
        page.until(lambda kind=kind: page.all(f"#timeline [data-kind='{kind}']"), kind)
    said = page.text("#timeline [data-kind='jobs_recovered'] span")
    assert f"recovered 1 job: {pages} page" in said
    assert f"{tokens} token" in said
    page.until(lambda: cells(page, job_id)["recoveries"] == "1", "the recovery in the list")
    assert page.all("#charts .death")


def test_the_page_comes_back_by_itself_when_the_api_was_killed(demo, page):
    job_id = demo.submit(400, seed=5)
    choose(page, job_id)
    page.until(lambda: tokens_of(page) > 20, "some text")
    page.js("window.sameDocument = true")
    pid = demo.signal("api", signal.SIGSTOP)  # hangs: connections stay open, nothing comes
    page.until(lambda: page.find("#banner").is_displayed(), "the banner")
    assert "No answer from the API since" in page.text("#banner")
    assert "stale" in page.find("#main").get_attribute("class")
    demo.signal("api", signal.SIGKILL)
    demo.wait_changed("api", pid)
    page.until(lambda: not page.find("#banner").is_displayed(), "the next overview")
    assert "stale" not in page.find("#main").get_attribute("class")
    page.until(lambda: page.text("#live-state").startswith("completed"), "the end of the job", 60)
    assert page.text("#text") == demo.job(job_id)["output"]["text"]
    assert page.js("return window.sameDocument") is True
    page.complaints()  # a hung connection is one


def test_redis_that_hangs_is_told_and_forgotten_when_it_is_back(demo, page):
    demo.signal("redis", signal.SIGSTOP)
    try:
        page.until(lambda: "Redis is away since" in page.text("#banner"), "the banner", 40)
    finally:
        demo.signal("redis", signal.SIGCONT)
    page.until(lambda: not page.find("#banner").is_displayed(), "the next look")
    page.until(lambda: page.all("#timeline [data-kind='store_back']"), "its return")
    page.complaints()  # 503s of the list of jobs


def test_it_can_be_used_with_the_keyboard_alone(demo, page):
    first, second = demo.submit(3, seed=8), demo.submit(3, seed=9)
    page.until(lambda: page.all(f"[data-job='{second}']") and page.all(f"[data-job='{first}']"), "both jobs")
    reached = []
    for _ in range(30):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        element = page.driver.switch_to.active_element
        if element.tag_name == "body":
            break
        ring = page.js(
            "const s = getComputedStyle(arguments[0]); return s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2", element
        )
        assert ring, element.get_attribute("outerHTML")
        reached.append(element.get_attribute("id") or element.get_attribute("data-job") or element.get_attribute("class"))
        if reached[-1] == first:
            element.send_keys(Keys.ENTER)
    assert {"skip", "start", "kill", first, second, "text"} <= set(reached)
    assert reached.index("kill") < reached.index(second) < reached.index(first) < reached.index("text")  # newest first
    assert page.find(f"[data-job='{first}']").get_attribute("aria-pressed") == "true"
    page.until(lambda: page.text("#text") == demo.job(first)["output"]["text"], "the text of the first")


def test_what_is_told_aloud_is_little(demo, page):
    assert page.find("#spoken").get_attribute("aria-live") == "polite"
    assert [e.get_attribute("id") for e in page.all("[aria-live]:not([aria-live='off'])")] == ["spoken"]
    for heading in page.all("section"):
        assert page.text(f"#{heading.get_attribute('aria-labelledby')}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_fits_and_can_be_read(demo, page, scheme, size):
    page.prefer(prefers_color_scheme=scheme)
    page.resize(*size)
    job_id = demo.submit(30)
    choose(page, job_id)
    page.until(lambda: page.text("#live-state").startswith("completed"), "the end of the job")
    widest = page.js("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert widest[0] <= widest[1] == size[0]
    seen = page.js(CONTRASTS)
    assert len(seen) > 25
    poor = [(text, ratio) for text, ratio in seen if ratio < 4.5]
    assert poor == []
    ground = page.js("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) > 3 * 128) == (scheme == "light")


#: By WCAG: of every text that is shown, the contrast with the nearest ground behind it.
CONTRASTS = """
const luminance = (rgb) => {
  const [r, g, b] = rgb.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
const ground = (element) => {
  for (; element; element = element.parentElement) {
    const found = numbers(getComputedStyle(element).backgroundColor);
    if (found.length < 4 || found[3] > 0) return found.slice(0, 3);
  }
};
const found = [];
for (const element of document.querySelectorAll("body *")) {
  const text = [...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join("");
  if (!text || !element.checkVisibility() || element.closest("[data-count='0'], button:disabled")) continue;
  const [a, b] = [luminance(numbers(getComputedStyle(element).color).slice(0, 3)), luminance(ground(element))];
  found.push([text.slice(0, 40), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]);
}
return found;
"""


def test_reduced_motion_is_honoured(page):
    page.prefer(prefers_reduced_motion="reduce")
    moving = """return [...document.querySelectorAll("*")].map((e) => getComputedStyle(e))
        .filter((s) => parseFloat(s.transitionDuration) > 0 || s.animationName !== "none").length"""
    assert page.js(moving) == 0
    page.prefer(prefers_reduced_motion="no-preference")
    assert page.js(moving) > 0  # so there was something to turn off


def test_the_charts_move_while_jobs_run(demo, page):
    demo.submit(120, seed=11)
    values = [".chart:nth-child(1) .value", ".chart:nth-child(2) .value", ".chart:nth-child(3) .value"]
    page.until(lambda: page.text(values[0]).endswith("tokens/s") and float(page.text(values[0]).split()[0]) > 5, "a throughput")
    page.until(
        lambda: page.text(values[1]).endswith("ms") and float(page.text(values[1]).split()[0]) >= 40, "a time between tokens"
    )
    page.until(lambda: page.text(values[2]).endswith("tokens") and float(page.text(values[2]).split()[0]) > 0, "a lag")
    length = "return document.querySelector('.chart path').getAttribute('d').length"
    before = page.js(length)
    page.until(lambda: page.js(length) > before, "a longer line")
