"""A long answer, read to its end whatever dies meanwhile.

    OPENAI_BASE_URL=http://localhost:8710/v1 OPENAI_API_KEY=none python resume.py "Once upon a time"

The text goes to standard output. Kill the engine, the API or Redis while it comes: nothing is lost and nothing comes twice.
"""

import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

from openai import APIConnectionError, InternalServerError, OpenAI
from openai.types.responses import ResponseStreamEvent

ENDINGS = ("response.completed", "response.incomplete", "response.failed")
TRIES = 100  #: without a single event between them


def events(client: OpenAI, **request: Any) -> Iterator[ResponseStreamEvent]:
    """Each event of a streamed response once, in order."""
    key = {"Idempotency-Key": str(uuid.uuid4())}  # a POST that is sent again makes no second response
    response_id, last, tries = None, None, 0
    while True:
        try:
            if response_id is None:
                stream = client.responses.create(stream=True, extra_headers=key, **request)
            else:
                stream = client.responses.retrieve(response_id, stream=True, starting_after=last)
            for event in stream:
                response_id, last, tries = response_id or event.response.id, event.sequence_number, 0
                yield event
                if event.type in ENDINGS:
                    return
        except (APIConnectionError, InternalServerError):  # the API was killed, or is starting again
            tries += 1
            if tries == TRIES:
                raise
        time.sleep(0.5)  # also after a stream that ended too early: its API is about to end


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "Once upon a time there was a server that died in the middle of"
    with OpenAI() as client:
        # In the background it goes on even when this program dies: its id is all that is needed to come back.
        for event in events(client, input=prompt, background=True, max_output_tokens=300):
            if event.type == "response.created":
                print(event.response.id, file=sys.stderr, flush=True)
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
    print(f"\n{event.response.status}", file=sys.stderr)


if __name__ == "__main__":
    main()
