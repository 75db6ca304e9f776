"""A file of requests in, a file of answers out.

    OPENAI_BASE_URL=http://localhost:8710/v1 OPENAI_API_KEY=none python batch.py Paris Rome Berlin

The answers go to standard output, a line of JSON each. Kill this program and run it again: it goes on with its batch.
"""

import hashlib
import json
import sys
import time

from openai import OpenAI

ENDED = ("completed", "failed", "expired", "cancelled")


def requests(model: str, cities: list[str]) -> bytes:
    def line(number: int, city: str) -> str:
        messages = [{"role": "user", "content": f"Why should I visit {city}?"}]
        body = {"model": model, "messages": messages, "max_completion_tokens": 100, "seed": number}
        return json.dumps({"custom_id": city, "method": "POST", "url": "/v1/chat/completions", "body": body})

    return "".join(f"{line(number, city)}\n" for number, city in enumerate(cities)).encode()


def main() -> None:
    with OpenAI(max_retries=20) as client:  # each call rides over an API that is killed and starts again
        content = requests(client.models.list().data[0].id, sys.argv[1:] or ["Paris", "Rome", "Berlin"])
        key = {"Idempotency-Key": hashlib.sha256(content).hexdigest()}  # the same lines are the same batch
        file = client.files.create(file=("requests.jsonl", content), purpose="batch", extra_headers=key)
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", extra_headers=key
        )
        while batch.status not in ENDED:
            counts = batch.request_counts
            print(f"{batch.id} {batch.status}: {counts.completed} of {counts.total}", file=sys.stderr, flush=True)
            time.sleep(0.5)
            batch = client.batches.retrieve(batch.id)
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                print(client.files.content(file_id).text, end="")
    print(f"{batch.id} {batch.status}", file=sys.stderr)
    if batch.status != "completed":
        sys.exit("\n".join(f"line {error.line}: {error.message}" for error in batch.errors.data) if batch.errors else 1)


if __name__ == "__main__":
    main()
