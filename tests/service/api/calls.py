"""Calls that wait for an engine, made from a thread, while the test plays the engine."""

import threading

from tests.service.api.rig import until


def in_thread(call):
    """Runs the call; answers with a function that waits for its result."""
    result: list = []

    def run() -> None:
        try:
            result.append(call())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait():
        thread.join(20)
        assert result, "no answer"
        if isinstance(result[0], Exception):
            raise result[0]
        return result[0]

    return wait


def claimed(engine):
    return until(lambda: engine.claim())[0]
