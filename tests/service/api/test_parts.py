"""An assistant's text and its parts: whatever the pieces, the parts are the same, and nothing of the text is lost."""

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.api.openai.dialects import DIALECTS, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS
from service.api.openai.parts import Arguments, Call, Content, Expected, Parser, Parts, joined

TOOLS = frozenset({"get_weather", "f"})
CALL = '{"name": "get_weather", "arguments": {"city": "Köln", "at": [1, {"x": "}"}]}}'
ARGUMENTS = '{"city": "Köln", "at": [1, {"x": "}"}]}'
LLAMA_CALL = '{"name": "f", "parameters": {}}'


def parse(text, expected, cuts=()):
    parser, deltas, at = Parser(expected), [], 0
    for cut in sorted({min(cut, len(text)) for cut in cuts}):
        deltas += parser.push(text[at:cut])
        at = cut
    return joined(deltas + parser.push(text[at:]) + parser.finish())


def hermes(**more):
    return Expected(HERMES, TOOLS, **more)


WHOLE = [
    ("plain", Expected(), "  a <think> b </think> <tool_call> \n", Parts("", "  a <think> b </think> <tool_call> \n", ())),
    ("reasoning", Expected(reasons=True), "<think>\nwhy\n</think>\n\nso \n", Parts("why", "so \n", ())),
    ("opened by the prompt", Expected(reasons=True, thinking=True), "\nwhy\n</think>\n\nso", Parts("why", "so", ())),
    ("reasoning only comes first", Expected(reasons=True), "see <think>x</think>", Parts("", "see <think>x</think>", ())),
    ("cut off amid the reasoning", Expected(reasons=True), "<think>why, </thi", Parts("why, </thi", "", ())),
    ("a call", hermes(), f"<tool_call>\n{CALL}\n</tool_call>", Parts("", "", (("get_weather", ARGUMENTS),))),
    (
        "text, two calls, text",
        hermes(reasons=True),
        f'<think>hm</think>\nLet me. \n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{{"name": "f"}}</tool_call>\ndone',
        Parts("hm", "Let me.done", (("get_weather", ARGUMENTS), ("f", "{}"))),
    ),
    (
        "only the first is allowed",
        hermes(max_calls=1),
        f'<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{{"name": "f", "arguments": {{}}}}</tool_call>',
        Parts("", "", (("get_weather", ARGUMENTS),)),
    ),
    (
        "arguments first",
        hermes(),
        '<tool_call>{"arguments": {"a": "</tool_call>"}, "name": "f"}</tool_call>',
        Parts("", "", (("f", '{"a": "</tool_call>"}'),)),
    ),
    ("without arguments", hermes(), '<tool_call>{"name": "f"}</tool_call>', Parts("", "", (("f", "{}"),))),
    ("cut off amid the arguments", hermes(), '<tool_call>{"name": "f", "arguments": {"a": "b', Parts("", "", (("f", '{"a": "b'),))),
    ("cut off before them", hermes(), ' <tool_call>\n{"name": "f", "arg', Parts("", ' <tool_call>\n{"name": "f", "arg', ())),
    ("cut off amid the opener", hermes(), "a <tool_ca", Parts("", "a <tool_ca", ())),
    ("no JSON", hermes(), "a\n<tool_call>{f()}</tool_call>\n", Parts("", "a\n<tool_call>{f()}</tool_call>\n", ())),
    (
        "an unknown tool",
        hermes(),
        '<tool_call>{"name": "g", "arguments": {}}',
        Parts("", '<tool_call>{"name": "g", "arguments": {}}', ()),
    ),
    ("more members", hermes(), '<tool_call>{"name": "f", "arguments": {}, "id": "}"}</tool_call>!', Parts("", "!", (("f", "{}"),))),
    (
        "mistral",
        Expected(MISTRAL, TOOLS),
        f'[TOOL_CALLS] [{CALL}, {{"name": "f", "arguments": {{}}}}]',
        Parts("", "", (("get_weather", ARGUMENTS), ("f", "{}"))),
    ),
    (
        "mistral's later form",
        Expected(MISTRAL_ARGS, TOOLS),
        'I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Köln"}[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}',
        Parts("", "I look.", (("get_weather", '{"city": "Köln"}'), ("f", "{}"))),
    ),
    ("llama", Expected(LLAMA, TOOLS), f"\n{LLAMA_CALL}; {LLAMA_CALL}", Parts("", "", (("f", "{}"), ("f", "{}")))),
    ("llama, marked", Expected(LLAMA, TOOLS), f"<|python_tag|>{LLAMA_CALL}", Parts("", "", (("f", "{}"),))),
    ("an answer in JSON", Expected(LLAMA, TOOLS), ' {"name": "Bob", "age": 3}', Parts("", ' {"name": "Bob", "age": 3}', ())),
    ("llama calls only at the beginning", Expected(LLAMA, TOOLS), f"So: {LLAMA_CALL}", Parts("", f"So: {LLAMA_CALL}", ())),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "text", "parts"), [case[1:] for case in WHOLE], ids=[case[0] for case in WHOLE])
def test_the_parts_of_a_text(expected, text, parts):
    assert parse(text, expected) == parts
    assert parse(text, expected, range(len(text))) == parts


PIECES = st.sampled_from(
    [
        "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", CALL, LLAMA_CALL,
        '{"arguments": {"a": 1}, "name": "f"}', "get_weather", "f", "{}", "[", "]", ",", ";", "{", "}", '"', "\\", " ", "\n", "a b",
        "x" * 300, "<", "</",
    ]
)  # fmt: skip
TEXTS = st.lists(PIECES | st.text(max_size=3), max_size=10).map("".join)
EXPECTED = st.builds(
    Expected,
    dialect=st.sampled_from([None, *DIALECTS.values()]),
    tools=st.just(TOOLS),
    max_calls=st.sampled_from([None, 1]),
    reasons=st.booleans(),
    thinking=st.booleans(),
).filter(lambda expected: expected.reasons or not expected.thinking)


@given(text=TEXTS, expected=EXPECTED, cuts=st.lists(st.integers(0, 1000), max_size=12))
@example(text='{"name": "f", "parameters": {"a": "' + "x" * 300 + '"}}', expected=Expected(LLAMA, TOOLS), cuts=[40])
@example(text='{"a": "' + "x" * 300 + '", "name": "f"}', expected=Expected(LLAMA, TOOLS), cuts=[200, 280])
def test_any_pieces_give_the_same_parts(text, expected, cuts):
    whole = parse(text, expected)
    assert parse(text, expected, cuts) == whole
    assert parse(text, expected, range(len(text))) == whole


@given(text=TEXTS, cuts=st.lists(st.integers(0, 1000), max_size=12))
def test_where_nothing_is_expected_all_is_content(text, cuts):
    assert parse(text, Expected(), cuts) == Parts("", text, ())


@given(text=TEXTS, expected=EXPECTED)
def test_no_word_is_lost_or_made_up(text, expected):
    """Where there is no call: but the marks of the reasoning, and white space between parts."""
    parts = parse(text, expected)
    if not parts.calls:
        kept, rest = "".join((parts.reasoning + parts.content).split()), iter(text)
        assert all(char in rest for char in kept), "the same characters, in their order"
        left_out = len("".join(text.split())) - len(kept)
        assert left_out in (0, len("<think>"), len("</think>"), len("<think></think>"))


@given(value=st.dictionaries(st.text(max_size=5), st.recursive(st.none() | st.text(), st.lists, max_leaves=5), max_size=4))
def test_any_arguments_come_through(value):
    written = json.dumps(value, ensure_ascii=False)
    text = f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'
    assert parse(text, hermes()) == Parts("", "", (("f", written),))


def test_arguments_come_as_they_are_written():
    parser = Parser(hermes())
    assert parser.push('<tool_call>\n{"name": "f", "arguments"') == []
    assert parser.push(': {"a": ') == [Call(0, "f"), Arguments(0, '{"a": ')]
    assert parser.push('"b') == [Arguments(0, '"b')]
    assert parser.push('"}}\n</tool_call>') == [Arguments(0, '"}')]
    assert parser.finish() == []


def test_content_comes_as_it_is_written():
    parser = Parser(hermes())
    assert parser.push("one ") == [Content("one")]
    assert parser.push("two <") == [Content(" two")]
    assert parser.push("b>") == [Content(" <b>")]


@pytest.mark.parametrize("expected", [Expected(LLAMA, TOOLS), hermes()], ids=["llama", "hermes"])
def test_an_answer_in_json_is_soon_under_way(expected):
    parser = Parser(expected)
    shown = joined([delta for _ in range(100) for delta in parser.push('{"items": [1, ')]).content
    assert len(shown) > 1000


def test_a_long_text_takes_a_time_in_proportion():
    def seconds(count, piece, opening):
        parser, began = Parser(hermes(reasons=True)), time.process_time()
        parser.push(opening)
        for _ in range(count):
            parser.push(piece)
        parser.finish()
        return time.process_time() - began

    for opening in ("", "<think>", '<tool_call>{"name": "f", "arguments": {"a": "', '<tool_call>{"a": "'):
        seconds(100, "word ", opening)
        assert seconds(20_000, "word ", opening) < 2.0, opening
