"""Answers that are bound: whatever the tokens that a grammar lets through, the calls that are read off them fit their schemas."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest

from service.api.formats import ResponseFormat
from service.api.openai.answer_grammar import answer_grammar
from service.api.openai.dialects import DIALECTS, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS
from service.api.openai.parts import Expected, Parser, joined
from service.api.openai.tools import Function, ToolUse
from service.api.problems import InvalidRequest
from tests.service.api import chat_models
from tests.service.api.chat_models import chat_model

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = Function(name="get_weather", parameters=CITY, strict=True)
STOP = Function(name="stop", parameters={"properties": {"now": {"type": "boolean"}}, "additionalProperties": False})
SCHEMAS = {"get_weather": CITY, "stop": STOP.parameters}
PERSON = {"type": "json_schema", "json_schema": {"name": "p", "schema": CITY}}
END = 2
#: Words of the dialects as special tokens, as tokens that show themselves, and as plain text.
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
KINDS = {"special": dict.fromkeys(WORDS, True), "shown": dict.fromkeys(WORDS, False), "plain": {}}


@pytest.fixture(scope="module", params=KINDS)
def tokenization(request, tmp_path_factory):
    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        patch.setitem(chat_models.TOKENS, request.param, KINDS[request.param])
        patch.setitem(chat_models.TEMPLATES, request.param, "")
        return chat_model(tmp_path_factory.mktemp(request.param), request.param).tokenization


def grammar_for(tokenization, expected, use, wanted=None):
    async def in_thread(call):
        return call()

    context = SimpleNamespace(model=SimpleNamespace(tokenization=tokenization), in_tokenizer_thread=in_thread)
    form = ResponseFormat.model_validate(wanted) if wanted is not None else None
    return asyncio.run(answer_grammar(context, form, "response_format", expected, use))


def allowed(state):
    return set(np.flatnonzero(np.unpackbits(state.allowed.view(np.uint8), bitorder="little")).tolist())


def takes(tokenization, grammar, text):
    """Whether the grammar lets this text through, and end there."""
    state = tokenization.grammars.begin(grammar)
    for token in tokenization.encode_rendered(text):
        if token not in allowed(state):
            return False
        tokenization.grammars.push([(state, token)])
        assert not state.problem
    return END in allowed(state) or state.ended


def walked(tokenization, grammar, seed, most=400):
    """What a model says that knows nothing but the grammar; it seldom ends of its own."""
    rng, state, tokens = np.random.default_rng(seed), tokenization.grammars.begin(grammar), []
    marks = [tokenization.added_token(word) for word in WORDS]
    while not state.ended and len(tokens) < most:
        choices = allowed(state)
        marked = sorted(choices.intersection(marks))
        if END in choices and rng.random() < 0.2:
            break
        pick = marked if marked and rng.random() < 0.2 else sorted(choices - {END})
        tokens.append(int(rng.choice(pick)))
        tokenization.grammars.push([(state, tokens[-1])])
        assert not state.problem
    ended = state.ended or END in allowed(state)
    return tokenization._tokenizer.decode(tokens, skip_special_tokens=False), ended


def read(text, expected):
    parser = Parser(expected)
    return joined(parser.push(text) + parser.finish())


def said(dialect, *calls):
    """Calls in the dialect's own spelling."""
    spelling = dialect.spelling
    written = [f"{spelling.head[0]}{name}{spelling.head[1]}{json.dumps(arguments)}{spelling.tail}" for name, arguments in calls]
    return spelling.begin + spelling.between.join(written) + spelling.end


RIGHT = ("get_weather", {"city": "Bonn", "days": 3})
WRONG = ("get_weather", {"city": "Bonn", "days": 30})
OTHER = ("stop", {"now": True})
every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)


def expecting(dialect, use, **more):
    return Expected(dialect, use.names, None if use.parallel else 1, **more)


@every_dialect
def test_a_call_that_must_come(tokenization, dialect):
    use = ToolUse((WEATHER, STOP), (WEATHER, STOP))
    expected = expecting(dialect, use)
    grammar = grammar_for(tokenization, expected, use)
    assert takes(tokenization, grammar, said(dialect, RIGHT))
    assert takes(tokenization, grammar, said(dialect, RIGHT, OTHER, RIGHT))
    assert read(said(dialect, RIGHT, OTHER), expected).calls == tuple((name, json.dumps(value)) for name, value in (RIGHT, OTHER))
    for text in (
        "",
        "I look.",
        said(dialect, WRONG),
        said(dialect, RIGHT, WRONG),
        said(dialect, ("f", {})),
        "I look." + said(dialect, RIGHT),
    ):
        assert not takes(tokenization, grammar, text), text


@every_dialect
def test_one_call_and_of_the_tool_that_is_named(tokenization, dialect):
    use = ToolUse((WEATHER, STOP), (STOP,), parallel=False)
    grammar = grammar_for(tokenization, expecting(dialect, use), use)
    assert takes(tokenization, grammar, said(dialect, OTHER))
    for calls in ((RIGHT,), (OTHER, OTHER)):
        assert not takes(tokenization, grammar, said(dialect, *calls))


@every_dialect
def test_a_text_or_calls_that_fit(tokenization, dialect):
    use = ToolUse((WEATHER, STOP))
    grammar = grammar_for(tokenization, expecting(dialect, use), use)
    assert takes(tokenization, grammar, "It rains <b>.")
    assert takes(tokenization, grammar, said(dialect, RIGHT, OTHER))
    assert not takes(tokenization, grammar, said(dialect, WRONG))
    if dialect.opener:
        assert takes(tokenization, grammar, "I look.\n" + said(dialect, RIGHT))
        assert not takes(tokenization, grammar, "I look.\n" + said(dialect, WRONG))
        assert not takes(tokenization, grammar, f"I look. {dialect.opener} x")
    else:
        assert not takes(tokenization, grammar, ' {"an": "answer"}'), "it would be read as a call"


@pytest.mark.parametrize("opened", [True, False], ids=["opened by the prompt", "by the model or not"])
@every_dialect
def test_what_is_bound_comes_after_the_reasoning(tokenization, dialect, opened):
    thoughts = "hm, {\n</think>\n\n" if opened else "<think>\nhm, {\n</think>\n\n"
    use = ToolUse((WEATHER,), (WEATHER,))
    expected = expecting(dialect, use, reasons=True, thinking=opened)
    for grammar, answer, wrong in (
        (grammar_for(tokenization, expected, use), said(dialect, RIGHT), said(dialect, WRONG)),
        (grammar_for(tokenization, replace(expected, dialect=None), ToolUse(), PERSON), '{"city":"Bonn"}', '{"town":"Bonn"}'),
        (grammar_for(tokenization, expected, ToolUse((WEATHER,))), said(dialect, RIGHT), said(dialect, WRONG)),
    ):
        assert takes(tokenization, grammar, thoughts + answer)
        assert takes(tokenization, grammar, answer) is not opened
        assert not takes(tokenization, grammar, thoughts + wrong)


@pytest.mark.parametrize("dialect", [HERMES, MISTRAL, MISTRAL_ARGS], ids=lambda dialect: dialect.name)
def test_json_of_a_form_or_calls(tokenization, dialect):
    use = ToolUse((STOP,))
    grammar = grammar_for(tokenization, expecting(dialect, use), use, PERSON)
    assert takes(tokenization, grammar, '{"city":"Bonn"}')
    assert takes(tokenization, grammar, said(dialect, OTHER))
    assert not takes(tokenization, grammar, "It rains.")
    assert not takes(tokenization, grammar, said(dialect, ("stop", {"now": 1})))


@every_dialect
@pytest.mark.parametrize("forced", [True, False], ids=["forced", "auto"])
@pytest.mark.parametrize("reasons", [True, False], ids=["reasons", "does not reason"])
def test_whatever_a_grammar_lets_through_is_read_as_calls_that_fit(tokenization, dialect, forced, reasons):
    use = ToolUse((WEATHER, STOP), (WEATHER, STOP) if forced else ())
    expected = expecting(dialect, use, reasons=reasons)
    grammar, num_calls = grammar_for(tokenization, expected, use), 0
    for seed in range(12):
        text, ended = walked(tokenization, grammar, seed)
        if not ended:
            continue
        parts = read(text, expected)
        assert parts.calls or not forced
        assert not (forced and parts.content)
        for name, arguments in parts.calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
            num_calls += 1
    assert num_calls or not forced, "no walk came to an end"


REFUSED = [
    (HERMES, Function(name="f", parameters={"type": "string"}), None, "tools[0].parameters.type"),
    (HERMES, Function(name="f", parameters={"properties": {"a": {"not": {}}}}), None, "tools[0].parameters"),
    (HERMES, Function(name="f", parameters={"x-guidance": {}}), None, "tools[0].parameters.x-guidance"),
    (HERMES, WEATHER, {"type": "regex", "regex": "a"}, "response_format.type"),
    (LLAMA, WEATHER, PERSON, "response_format"),
]


@pytest.mark.parametrize(("dialect", "function", "wanted", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_bound_is_refused_by_name(tokenization, dialect, function, wanted, param):
    use = ToolUse((function,), () if wanted else (function,))
    with pytest.raises(InvalidRequest) as caught:
        grammar_for(tokenization, expecting(dialect, use), use, wanted)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")


def test_where_nothing_is_bound_there_is_no_grammar(tokenization):
    use = ToolUse((STOP,))
    assert grammar_for(tokenization, expecting(HERMES, use, reasons=True), use) == ""
    assert grammar_for(tokenization, Expected(), ToolUse(), {"type": "text"}) == ""
