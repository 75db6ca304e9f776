"""What a request says of tools, however its endpoint spells it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from service.api.request_model import RequestModel

MAX_TOOLS = 128
ToolName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class Function(RequestModel):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] = Field({}, description="A JSON schema of an object.")
    strict: bool = Field(False, description="Calls fit their schemas.")

    def for_template(self) -> dict[str, Any]:
        told = self.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        return {"type": "function", "function": told}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``functions``: that may be called. ``required``: of which one must be; empty where the model may answer otherwise."""

    functions: tuple[Function, ...] = ()
    required: tuple[Function, ...] = ()
    parallel: bool = True  #: more than one call may come
    place: str = "tools[{}]"  #: of a function in its request

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)

    @property
    def strict(self) -> bool:
        return any(function.strict for function in self.functions)


def tool_use(functions: Sequence[Function], choice: str | None, name: str | None, *, parallel: bool, place: str) -> ToolUse:
    """``choice``: none, auto or required; ``name``: of the one that must be called."""
    if choice == "none":
        return ToolUse()
    usable = tuple(functions)
    required = tuple(function for function in usable if choice == "required" or function.name == name)
    return ToolUse(usable, required, parallel, place)


def problem_with(functions: Sequence[Function], choice: str | None, name: str | None) -> tuple[str, str] | None:
    """(field, what is wrong with it)"""
    names = {function.name for function in functions}
    if len(names) != len(functions):
        return "tools", "two tools have the same name"
    if (choice not in (None, "none") or name is not None) and not names:
        return "tool_choice", "only together with tools"
    if name is not None and name not in names:
        return "tool_choice", "names none of the tools"
    return None
