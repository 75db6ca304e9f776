"""Answers that are objects of a pydantic model.

    OPENAI_BASE_URL=http://localhost:8710/v1 OPENAI_API_KEY=none python structured.py "Ada Lovelace, who was 36"

The objects go to standard output as JSON: one by Responses, one by Chat Completions. The engine chooses only among tokens that the
model's schema allows, also where a crash cut the object in the middle.
"""

import sys
import uuid

from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """Bounded: without bounds a small model may talk until its tokens run out, and JSON that is cut is no object."""

    name: str = Field(max_length=60)
    age: int = Field(ge=0, le=150)
    traits: list[str] = Field(min_length=1, max_length=3, json_schema_extra={"items": {"type": "string", "maxLength": 20}})


def main() -> None:
    about = sys.argv[1] if len(sys.argv) > 1 else "Ada Lovelace, who was 36"
    question = f"Describe this person: {about}"

    def key() -> dict[str, str]:
        return {"Idempotency-Key": str(uuid.uuid4())}  # the SDK sends a broken request again: the same key is the same answer

    with OpenAI(max_retries=20) as client:
        response = client.responses.parse(input=question, text_format=Person, max_output_tokens=300, extra_headers=key())
        if response.output_parsed is None:
            sys.exit(f"{response.status}: {response.error or response.incomplete_details}")
        print(response.output_parsed.model_dump_json(), flush=True)

        # Raises LengthFinishReasonError where the tokens ran out.
        completion = client.chat.completions.parse(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": question}],
            response_format=Person,
            max_completion_tokens=300,
            extra_headers=key(),
        )
        print(completion.choices[0].message.parsed.model_dump_json())


if __name__ == "__main__":
    main()
