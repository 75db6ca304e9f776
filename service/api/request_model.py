"""What all request bodies are made of: strict models whose refusals name their field."""

from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

NULL: dict[str, Any] = {"type": "null"}
#: The names of a union's members begin with it: pydantic puts them into an error's location, where no field has such a name.
UNION_MARK = "[union] "


def refuse(message: str, code: str = "invalid_value") -> NoReturn:
    # Jinja-like braces in a message would be taken for pydantic's own placeholders.
    raise PydanticCustomError(code, "{reason}", {"reason": message})


def tell_nulls(schema: dict[str, Any]) -> None:
    for name, field in schema["properties"].items():
        if name not in schema.get("required", ()) and NULL not in field.get("anyOf", ()):
            schema["properties"][name] = {"anyOf": [field, NULL]}


def as_parts(value: Any, kind: str = "text") -> Any:
    """A message's content as parts: a string is one part of type ``kind``. What is in an array is for the parts' own models."""
    if isinstance(value, str):
        return [{"type": kind, "text": value}]
    return value if isinstance(value, list) else refuse("must be a string or an array of text parts")


class RequestModel(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True, json_schema_extra=tell_nulls
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: Any) -> Any:
        """OpenAI's clients send null for "not given"."""
        return {key: value for key, value in values.items() if value is not None} if isinstance(values, dict) else values
