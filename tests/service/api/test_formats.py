"""What a client may ask of the text's form: two spellings of one grammar, and a named refusal for all that cannot be kept."""

import time

import pytest
from hypothesis import given, settings

from engine.grammar import Grammars
from service.api.formats import MAX_LENGTH, ResponseFormat, TextFormat, grammar_of
from service.api.problems import InvalidRequest
from service.api.schemas import JobRequest, validate
from storage.job_spec import JobSpec
from tests.json_schemas import json_grammar, schemas
from tests.service.api.conftest import new_memory_store
from tests.service.api.rig import MODEL, PROMPT, running_api

PLACE = "response_format.json_schema.schema"
SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}, "required": ["z", "a"]}


@pytest.fixture(scope="module")
def grammars(model):
    return model.tokenization.grammars


@pytest.fixture(scope="module")
def api(model):
    with running_api(new_memory_store(), model) as running:
        yield running


def chat(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def asked(response_format):
    return validate(JobRequest, {"prompt": "x", "response_format": response_format}).response_format


def test_both_spellings_are_one_grammar(grammars):
    first = ResponseFormat.model_validate(chat(SCHEMA))
    second = TextFormat.model_validate({"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True})
    assert grammar_of(first, grammars) == grammar_of(second, grammars, "text.format") == json_grammar(SCHEMA)
    for kind in ({"type": "json_object"}, {"type": "regex", "regex": "a+"}, {"type": "grammar", "grammar": 'start: "a"'}):
        same = [shape.model_validate(kind) for shape in (ResponseFormat, TextFormat)]
        assert grammar_of(same[0], grammars) == grammar_of(same[1], grammars) != ""


@pytest.mark.parametrize("wanted", [None, {"type": "text"}])
def test_plain_text_has_no_grammar(grammars, wanted):
    assert grammar_of(asked(wanted), grammars) == ""


@given(schemas())
@settings(max_examples=25)
def test_any_schema_of_ours_is_taken_in_the_order_of_its_names(grammars, schema):
    assert grammar_of(asked(chat(schema)), grammars) == json_grammar(schema)


@pytest.mark.parametrize(
    ("response_format", "param", "said"),
    [
        ("json", "response_format", "dictionary"),
        ({}, "response_format.type", "required"),
        ({"type": "yaml"}, "response_format.type", "'grammar'"),
        ({"type": "regex"}, "response_format.regex", "required"),
        ({"type": "regex", "regex": ""}, "response_format.regex", "at least 1"),
        ({"type": "regex", "regex": "a" * (MAX_LENGTH + 1)}, "response_format.regex", "at most"),
        ({"type": "regex", "regex": "a", "grammar": "b"}, "response_format.grammar", "does not go with"),
        ({"type": "json_object", "json_schema": {"name": "a", "schema": {}}}, "response_format.json_schema", "does not go with"),
        ({"type": "json_schema"}, "response_format.json_schema", "required"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, PLACE, "required"),
        ({"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}, "response_format.json_schema.name", "pattern"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": True}}, PLACE, "dictionary"),
        ({"type": "json_schema", "schema": {}}, "response_format.schema", "not known"),
    ],
)
def test_a_malformed_format_is_refused_by_its_field(response_format, param, said):
    with pytest.raises(InvalidRequest, match=said) as refused:
        asked(response_format)
    assert refused.value.param == param


def test_the_flat_shape_names_its_own_fields():
    for content, name in (({"name": "a"}, "schema"), ({"schema": {}}, "name"), ({"json_schema": {}}, "json_schema")):
        with pytest.raises(ValueError, match=name):
            TextFormat.model_validate({"type": "json_schema", **content})


def deep(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubling(keyword, levels=18):
    definitions = {f"a{i}": {keyword: [{"$ref": f"#/$defs/a{i - 1}"}] * 2} if i else {"type": "string"} for i in range(levels + 1)}
    return {"$ref": f"#/$defs/a{levels}", "$defs": definitions}


def branching():
    """Each of nine choices of four, and all of their combinations."""
    return {
        "allOf": [
            {"anyOf": [{"type": "object", "properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(4)]} for i in range(9)
        ]
    }


REFUSED = {
    "nested deeply": (deep(120), "recursion limit"),
    "long": ({"enum": ["x" * MAX_LENGTH]}, "characters"),
    "a web address": ({"$ref": "http://127.0.0.1:9/schema.json"}, "127.0.0.1"),
    "a file": ({"$ref": "file:///etc/hostname"}, "does not fetch"),
    "itself and nothing else": ({"$ref": "#"}, "no text satisfies it"),
    "a circle": ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "no text satisfies it"),
    "nothing": ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "nsatisfiable"),
    "all combinations": (branching(), "too large"),
    "a large modulus": ({"type": "integer", "multipleOf": 10**9 + 7}, "fuel"),
    "unique items": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "a negation": ({"not": {"type": "string"}}, "not"),
    "a condition": ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if"),
    "an unknown form": ({"type": "string", "format": "shoe size"}, "shoe size"),
    "an unknown type": ({"type": "strin"}, "strin"),
    "one of two that overlap": ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf"),
    "NaN": ({"const": float("nan")}, "NaN"),
    "a number beyond floats": ({"type": "number", "maximum": 10**400}, "number"),
    "a bad pattern": ({"type": "string", "pattern": "(a"}, "unclosed"),
    "a look ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
}
NAMES = [f"p{i}" for i in range(1000)]
TAKEN = {
    "many items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "many of many": {"type": "array", "maxItems": 1000, "items": {"type": "array", "maxItems": 1000, "items": {"type": "null"}}},
    "a long text": {"type": "string", "minLength": 10**6, "maxLength": 10**7},
    "a thousand thousand": {"type": "string", "pattern": "(a{1,1000}){1,1000}"},
    "a choice that doubles": doubling("anyOf"),
    "a sum that doubles": doubling("allOf"),
    "a thousand names": {"type": "object", "properties": {name: {"type": "null"} for name in NAMES}, "required": NAMES},
    "two hundred that may be missing": {"type": "object", "properties": {name: {"type": "null"} for name in NAMES[:200]}},
    "a tree": {"type": "object", "properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}}, "additionalProperties": False},
    "a later keyword": {"type": "string", "x-note": 1},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_kept_is_refused(grammars, name):
    schema, said = REFUSED[name]
    began = time.process_time()
    with pytest.raises(InvalidRequest, match=said) as refused:
        grammar_of(ResponseFormat.model_validate(chat(schema)), grammars)
    assert refused.value.param == PLACE
    assert len(refused.value.message) < 500
    assert time.process_time() - began < 5


@pytest.mark.parametrize("name", TAKEN)
def test_a_schema_that_looks_worse_than_it_is(grammars, name):
    """Compiled, and followed for some tokens, in bounded time."""
    began = time.process_time()
    state = grammars.begin(grammar_of(asked(chat(TAKEN[name])), grammars))
    for _ in range(30):
        if not state.ended:
            grammars.push([(state, int(state.allowed.view("uint8").nonzero()[0][0]) * 8 + first_bit(state))])
    assert not state.problem
    assert time.process_time() - began < 5


def first_bit(state):
    octet = int(state.allowed.view("uint8")[state.allowed.view("uint8").nonzero()[0][0]])
    return (octet & -octet).bit_length() - 1


@pytest.mark.parametrize(
    ("response_format", "said"),
    [
        ({"type": "regex", "regex": "(a"}, "unclosed group"),
        ({"type": "regex", "regex": r"(a)\1"}, "backreferences"),
        ({"type": "regex", "regex": "(a{0})"}, "no text but the empty one"),
        ({"type": "regex", "regex": r"[^\s\S]"}, "no text satisfies it"),
        ({"type": "grammar", "grammar": 'start: "a'}, "lexer error"),
        ({"type": "grammar", "grammar": "start: a\na: b\nb: a"}, "no text satisfies it"),
        ({"type": "grammar", "grammar": '{"grammars": []}'}, ""),
    ],
)
def test_a_regex_or_a_grammar_that_cannot_be_used_is_refused(grammars, response_format, said):
    with pytest.raises(InvalidRequest) as refused:
        grammar_of(asked(response_format), grammars)
    assert said in refused.value.message
    assert refused.value.param == f"response_format.{response_format['type']}"


@pytest.mark.parametrize(
    "regex", ["(a{1,1000}){1,1000}", "((a{1,100}){1,100}){1,100}", "(a|b)*a(a|b){500}", r"\w{1,1000}\W{1,1000}"]
)
def test_a_regex_that_looks_worse_than_it_is(grammars, regex):
    began = time.process_time()
    assert grammar_of(asked({"type": "regex", "regex": regex}), grammars)
    assert time.process_time() - began < 5


def test_settings_of_llguidance_are_not_for_clients(grammars):
    with pytest.raises(InvalidRequest) as refused:
        grammar_of(asked(chat({"type": "object", "x-guidance": {"whitespace_flexible": True}})), grammars)
    assert refused.value.param == f"{PLACE}.x-guidance"


def test_a_tokenizer_without_an_end_serves_grammars_too(model):
    grammars = Grammars(model.tokenization._tokenizer, model.tokenization.vocab_size, ())
    assert grammar_of(asked(chat(SCHEMA)), grammars)


# --- through HTTP ----------------------------------------------------------------------------------------------------------


def spec_of(api, job_id):
    return JobSpec.from_json(api.source.store.get(job_id).spec)


def test_a_job_carries_its_grammar(api):
    assert spec_of(api, api.submit(response_format=chat(SCHEMA))).grammar == json_grammar(SCHEMA)
    plain = api.source.store.get(api.submit(response_format={"type": "text"})).spec
    assert "grammar" not in plain  # an engine of an earlier version runs it


def test_a_completion_carries_its_grammar(api):
    body = {"model": MODEL, "prompt": PROMPT, "stream": True, "n": 2, "response_format": chat(SCHEMA)}
    with api.client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        (page,) = [api.source.store.jobs(status=None, tenant=None, limit=2, cursor=None)]
        assert [JobSpec.from_json(record.spec).grammar for record in page.jobs] == [json_grammar(SCHEMA)] * 2


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/completions"])
def test_what_cannot_be_kept_is_a_400_that_names_the_field(api, path):
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5}
    wrong = chat({"type": "array", "uniqueItems": True})
    for more, param in (({"response_format": wrong}, PLACE), ({"response_format": chat(SCHEMA), "ignore_eos": True}, "ignore_eos")):
        answer = api.client.post(path, json={**body, **more})
        assert answer.status_code == 400
        found = answer.json().get("error", answer.json())
        assert found["param"] == param
        assert "uniqueItems" in answer.text or param == "ignore_eos"
