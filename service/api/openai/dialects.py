"""How models write their tool calls and their reasoning, read off their own chat templates.

A call is a JSON object with a name and arguments, in all of them; what differs is what stands around it.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

THINK, THOUGHT = "<think>", "</think>"
_NAME = r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'


@dataclass(frozen=True, slots=True)
class Spelling:
    """How such models write calls themselves, white space included: begin call (between call)* end, where a call is its head, the
    arguments and the tail."""

    begin: str
    between: str
    end: str
    head: tuple[str, str] = ('{"name": "', '", "arguments": ')  #: before and behind the name
    tail: str = "}"


@dataclass(frozen=True, slots=True)
class Dialect:
    """``opener`` comes before the first call of a run, ``separator`` between two, ``closer`` after the last; each may be empty.

    Without an opener nothing but its form tells a call from an answer in JSON: it is one only where the answer begins.
    """

    name: str
    opener: str
    spelling: Spelling
    lead: str = ""  #: characters that may stand between the opener and the first call, besides white space
    separator: str = ""
    closer: str = ""
    head: re.Pattern[str] = re.compile(_NAME)  #: up to the arguments
    enclosed: bool = True  #: name and arguments are members of one object
    longest_head: int = 1 << 16  #: characters; a call whose name comes later is none
    others: tuple[str, ...] = ()  #: further tokens of its calls

    @property
    def words(self) -> tuple[str, ...]:
        """What may be a special token, and then gives no text."""
        return tuple(word for word in (self.opener, self.closer, *self.others) if len(word) > 1)


HERMES = Dialect(
    "hermes",
    "<tool_call>",
    Spelling("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    closer="</tool_call>",
)
MISTRAL = Dialect("mistral", "[TOOL_CALLS]", Spelling("[TOOL_CALLS] [", ", ", "]"), lead="[", separator=",", closer="]")
MISTRAL_ARGS = Dialect(
    "mistral-args",
    "[TOOL_CALLS]",
    Spelling("[TOOL_CALLS]", "[TOOL_CALLS]", "", head=("", "[ARGS]"), tail=""),
    head=re.compile(r"\s*(?P<name>[\w.-]{1,64})(?:\[CALL_ID\]\w{1,64})?\[ARGS\]\s*(?=\{)"),
    enclosed=False,
    longest_head=256,
    others=("[ARGS]", "[CALL_ID]"),
)
LLAMA = Dialect(
    "llama",
    "",
    Spelling("", "; ", "", head=('{"name": "', '", "parameters": ')),
    separator=";",
    longest_head=256,
    others=("<|python_tag|>",),
)
DIALECTS = {dialect.name: dialect for dialect in (HERMES, MISTRAL, MISTRAL_ARGS, LLAMA)}


def dialect_of(template: str, variables: Collection[str]) -> Dialect | None:
    """``variables``: that the template asks for. None: it has no tools, or writes their calls in no way that is known here."""
    if "tools" not in variables:
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template and "<function=" not in template:  # the latter: calls in XML
        return HERMES
    if '{"name": function name, "parameters":' in template:
        return LLAMA
    return None


def reasons(template: str) -> bool:
    return THOUGHT in template
