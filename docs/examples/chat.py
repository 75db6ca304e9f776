"""A streamed chat, and what to do when its connection breaks.

    OPENAI_BASE_URL=http://localhost:8710/v1 OPENAI_API_KEY=none python chat.py "Tell me a long story."

The text goes to standard output. OpenAI's Chat Completions cannot be resumed in the middle, but with an Idempotency-Key the same
request is the same answer: it is told again from its beginning, and what is known already is skipped.
"""

import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

from openai import APIConnectionError, InternalServerError, OpenAI
from openai.types.chat import ChatCompletionChunk

TRIES = 100  #: without a single chunk between them


def chunks(client: OpenAI, **request: Any) -> Iterator[ChatCompletionChunk]:
    """Each chunk of an answer with one choice, once, in order. Chunks follow from the tokens alone: all tellings are the same."""
    key = {"Idempotency-Key": str(uuid.uuid4())}
    known, tries = 0, 0
    while True:
        try:
            stream = client.chat.completions.create(stream=True, extra_headers=key, **request)
            for number, chunk in enumerate(stream):
                if number < known:
                    continue
                known, tries = number + 1, 0
                yield chunk
                if chunk.choices and chunk.choices[0].finish_reason:
                    return
        except (APIConnectionError, InternalServerError):  # the API was killed, or is starting again
            tries += 1
            if tries == TRIES:
                raise
        time.sleep(0.5)  # also after a stream that ended too early: its API is about to end


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "Tell me a long story."
    with OpenAI(max_retries=20) as client:
        request = {
            "model": client.models.list().data[0].id,
            "messages": [{"role": "user", "content": prompt}],
            "max_completion_tokens": 300,
            "store": True,
        }
        for chunk in chunks(client, **request):
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        # Stored, it can be fetched whole by its id: also by a program that never saw the stream.
        stored = client.chat.completions.retrieve(chunk.id)
    print(f"\n{stored.id} {stored.choices[0].finish_reason}: {stored.usage.completion_tokens} tokens", file=sys.stderr)


if __name__ == "__main__":
    main()
