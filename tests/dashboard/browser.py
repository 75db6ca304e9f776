"""Chromium without a window, driven through the dashboard; what it did on the network and said on its console is kept.

Debian's ``chromium`` and ``chromium-driver``; nothing is downloaded.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

DRIVER, CHROMIUM = shutil.which("chromedriver"), shutil.which("chromium")
#: In CI these tests are proof only when they are run.
needs_chromium = pytest.mark.skipif(
    not (DRIVER and CHROMIUM) and not os.environ.get("CI"), reason="chromium and chromium-driver are not installed"
)
DESKTOP, PHONE = (1280, 900), (360, 780)


class Browser:
    """One tab on one server."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.url = url
        self.hosts: set[str] = set()
        self.urls: list[str] = []

    def open(self) -> "Browser":
        self.driver.get(self.url)
        return self

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """What is in the document, whether or not it is scrolled into view; empty where there is no such element."""
        return str(self.js("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def js(self, script: str, *arguments: object) -> object:
        return self.driver.execute_script(script, *arguments)

    def until(self, condition, what: str, seconds: float = 30.0):
        """Wait for ``condition()`` to be true, and answer with it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := condition():
                return found
            time.sleep(0.05)
        raise AssertionError(f"{what} did not happen; the page says: {self.text('body')[-1500:]}")

    def prefer(self, **features: str) -> None:
        """``prefers_color_scheme="dark"``."""
        given = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": given})

    def resize(self, width: int, height: int) -> None:
        """The viewport itself: a window has a least width."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def picture(self, path: Path) -> None:
        path.write_bytes(self.driver.get_screenshot_as_png())

    def complaints(self) -> list[str]:
        """What the console got since the last call, but for answers that did not come while the server was away."""
        entries = [entry for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]
        return [e["message"] for e in entries if "net::ERR_" not in e["message"]]

    def note_requests(self) -> None:
        """Every address that the page asked for since the last call."""
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
                url = message["params"].get("request", message["params"])["url"]
                if urlsplit(url).scheme not in ("data", "about", "chrome"):
                    self.urls.append(url)
                    self.hosts.add(urlsplit(url).netloc)


@contextmanager
def browser(url: str) -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or "chromium"
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-proxy-server",
                 "--disable-background-networking", "--disable-component-update", "--hide-scrollbars"):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER or "chromedriver"))
    try:
        made = Browser(driver, url)
        made.resize(*DESKTOP)
        yield made
    finally:
        driver.quit()
