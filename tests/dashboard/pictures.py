"""The pictures of docs/dashboard.md: the demo model at work, a while after its engine was killed from the page.

``python -m tests.dashboard.pictures docs/images``
"""

import sys
import tempfile
import time
from pathlib import Path

import httpx

from service.demo_stage import Stage
from tests.dashboard.browser import DESKTOP, PHONE, Browser, browser

PROMPTS = (
    "Tell me a story about an old lighthouse keeper.",
    "Tell me a story about a clockmaker who repairs the moon.",
    "Explain to a child why the sea is salty.",
)
TOKENS = (560, 240, 160)
_LARGEST = 200_000  #: bytes of a picture


def submit(url: str, prompt: str, tokens: int, seed: int) -> str:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "seed": seed, "temperature": 0.7}
    answer = httpx.post(f"{url}/v1/jobs", json=body | {"ignore_eos": True}, timeout=30, trust_env=False)
    return str(answer.raise_for_status().json()["id"])


def play(page: Browser, url: str) -> None:
    """Three jobs, a kill in their midst, and some of what comes after."""
    ids = [submit(url, prompt, tokens, seed) for seed, (prompt, tokens) in enumerate(zip(PROMPTS, TOKENS, strict=True))]
    page.until(lambda: page.all(f"[data-job='{ids[0]}']"), "the first job")
    page.js("document.querySelector(`[data-job='${arguments[0]}']`).click()", ids[0])
    page.until(lambda: len(page.text("#text")) > 500, "some text", 60)
    page.js("document.querySelector('#kill').click()")
    page.until(lambda: page.all("#text .mark"), "the recovery", 120)
    submit(url, PROMPTS[0], 200, 7)  # its prompt is cached
    page.until(lambda: len(page.text("#text")) > 1100, "more text", 60)


def take(page: Browser, folder: Path) -> None:
    for name, scheme, size in (("light", "light", DESKTOP), ("dark", "dark", DESKTOP), ("phone", "light", PHONE)):
        page.prefer(prefers_color_scheme=scheme)
        page.resize(*size)
        time.sleep(1.5)
        whole = int(page.js("return document.documentElement.scrollHeight"))
        page.resize(size[0], whole if size == DESKTOP else 1500)
        time.sleep(1.5)
        path = folder / f"dashboard-{name}.png"
        page.picture(path)
        assert path.stat().st_size < _LARGEST, f"{path} has {path.stat().st_size} bytes"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        stage = Stage(Path(directory), "demo")
        try:
            stage.wait_until_ready(lambda _why: None)
            with browser(stage.url) as page:
                page.open().until(lambda: page.find("#main").is_displayed(), "an overview")
                play(page, stage.url)
                take(page, folder)
        finally:
            stage.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
