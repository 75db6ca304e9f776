"""When is the service ready: ``/readyz`` of the api, and of the engine, which a living api need not have missed yet."""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

_SAY_WHY_AFTER = 15.0


class ReadyWatch:
    """Says "ready: URL" once ``/readyz`` answers 200, and again after each interruption; says why when it takes long."""

    def __init__(self, url: str, say: Callable[[str], None], *, engine_url: str | None = None) -> None:
        self._url = url
        self._places = [url] if engine_url is None else [engine_url, url]
        self._say = say
        self._looking = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ready-watch", daemon=True)

    def start(self) -> None:
        self._looking.set()
        self._thread.start()

    def look_again(self) -> None:
        self._looking.set()

    @property
    def ready(self) -> bool:
        """As far as is known: since the last look that was asked for."""
        return self._thread.is_alive() and not self._looking.is_set()

    def stop(self) -> None:
        self._stopped.set()
        self._looking.set()

    def _run(self) -> None:
        while True:
            self._looking.wait()
            since = said = time.monotonic()
            while not self._stopped.wait(0.1):
                why = next(filter(None, map(why_not_ready, self._places)), "")
                now = time.monotonic()
                if not why:
                    self._looking.clear()
                    self._say(f"ready: {self._url}")
                    break
                if now - said >= _SAY_WHY_AFTER:
                    said = now
                    self._say(f"not ready after {now - since:.0f} s: {why}")
            if self._stopped.is_set():
                return


def why_not_ready(url: str) -> str:
    """Empty when ``/readyz`` answers 200; else its reasons. By http.client: a proxy variable must not come between."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=2.0)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        body = answer.read(10_000)
    except (OSError, http.client.HTTPException) as error:
        return f"no answer from {url} ({error})"
    finally:
        connection.close()
    return "" if answer.status == 200 else _reasons(body) or f"{url}/readyz answers {answer.status}"


def _reasons(body: bytes) -> str:
    with contextlib.suppress(ValueError, AttributeError, KeyError, TypeError):
        return "; ".join(f"{name}: {why}" for name, why in json.loads(body)["reasons"].items())
    return ""
