"""A grammar's state is its tokens: rebuilt from any of them it allows what the live one did, and its jobs say what it allows."""

import json
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import Tokenizer

from engine.errors import GrammarFailed
from engine.grammar import Grammars
from engine.sampler import Draw, SamplingParams, sample_rows
from engine.sequence import FinishReason
from tests.json_schemas import json_grammar, schemas
from tests.rigs import make_rig, request
from tests.tiny_models import VOCAB_SIZE

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
#: So many names that may be missing are too much behind the first one.
TOO_COMPLEX = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(1000)}, "required": ["p0"]}
END = 2  #: the tiny model's end-of-text token


def regex_grammar(pattern):
    return LLMatcher.grammar_from_regex(pattern)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, VOCAB_SIZE, (END,), threads=2)


def allowed(state):
    return set(np.flatnonzero(np.unpackbits(state.allowed.view(np.uint8), bitorder="little")).tolist())


def walk(grammars, grammar, seed, most=60):
    """Random tokens that the grammar allows, and every state's mask on the way."""
    rng, state, tokens = np.random.default_rng(seed), grammars.begin(grammar), []
    masks = [allowed(state)]
    while not state.ended and len(tokens) < most:
        tokens.append(int(rng.choice(sorted(masks[-1] - {END}))))
        grammars.push([(state, tokens[-1])])
        assert not state.problem
        masks.append(allowed(state))
    return tokens, masks, state.ended


@given(schemas(), st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_rebuilt_from_any_prefix_it_allows_the_same(grammars, schema, seed):
    grammar = json_grammar(schema)
    tokens, masks, ended = walk(grammars, grammar, seed)
    for done in range(len(tokens) + (not ended)):
        assert allowed(grammars.begin(grammar, tokens[:done])) == masks[done]


def test_states_of_one_grammar_are_apart(grammars):
    """They are copies of one compiled grammar."""
    grammar = json_grammar(PERSON)
    first, second = grammars.begin(grammar), grammars.begin(grammar)
    before = allowed(second)
    grammars.push([(first, min(allowed(first)))])
    assert allowed(second) == before != allowed(first)


def test_what_it_refuses_is_a_problem_of_one_state(grammars):
    good, bad = (grammars.begin(json_grammar(PERSON)) for _ in range(2))
    token = min(allowed(good))
    grammars.push([(good, token), (bad, END)])
    assert not good.problem
    assert bad.problem
    assert not bad.ended
    assert allowed(good) == allowed(grammars.begin(json_grammar(PERSON), [token]))


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (regex_grammar("(a"), "unclosed group"),
        (regex_grammar(""), "no text but the empty one"),
        (regex_grammar(r"[^\s\S]"), "no text satisfies it"),
        (json_grammar({"type": "array", "uniqueItems": True}), "uniqueItems"),
        ("start: nothing", "nothing"),
        ("{}", "grammar"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(grammars, grammar, said):
    with pytest.raises(GrammarFailed, match=said):
        grammars.begin(grammar)


def test_a_log_that_it_does_not_allow_is_refused(grammars, tokenizer):
    ids = tokenizer.encode('{"name":"x","age":7}').ids
    wrong = tokenizer.encode('{"name":"x","age":"').ids
    grammars.begin(json_grammar(PERSON), ids[:-1])
    with pytest.raises(GrammarFailed, match=f"token {len(wrong) - 1} of the log"):
        grammars.begin(json_grammar(PERSON), wrong)
    with pytest.raises(GrammarFailed, match="nothing may follow"):
        grammars.begin(json_grammar(PERSON), ids)


@pytest.mark.parametrize("end_ids", [(), (VOCAB_SIZE + 7,), (1, END)], ids=["no end", "an end that is no token", "two ends"])
def test_only_the_models_own_ends_may_come(tokenizer, end_ids):
    grammars = Grammars(tokenizer, VOCAB_SIZE, end_ids)
    state = grammars.begin(regex_grammar("[a-c]+"))
    for token in tokenizer.encode("abc").ids:
        grammars.push([(state, token)])
    specials = {0, 1, 2}
    assert allowed(state) & specials == set(end_ids) & specials
    assert max(allowed(state)) < VOCAB_SIZE
    assert not state.ended


def test_no_token_beyond_the_models_vocabulary(tokenizer):
    """A tokenizer may know more tokens than the model has rows for."""
    letters = tokenizer.encode("abc").ids
    grammars = Grammars(tokenizer, max(letters), (END,))
    assert max(allowed(grammars.begin(regex_grammar("[abc]")))) < max(letters)
    (last,) = tokenizer.encode("zabc"[letters.index(max(letters)) + 1]).ids
    assert last == max(letters)
    with pytest.raises(GrammarFailed, match="no token of this model"):
        grammars.begin(regex_grammar("abc"[letters.index(last)]))


# --- the sampler -----------------------------------------------------------------------------------------------------------


def mask_of(ids, vocab):
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


PARAMS = [
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.0),
    SamplingParams(seed=3, top_k=5),
    SamplingParams(seed=4, top_p=0.4),
    SamplingParams(seed=5, min_p=0.2, logprobs=3),
    SamplingParams(seed=6, repetition_penalty=1.7, frequency_penalty=0.4, logprobs=0),
    SamplingParams(seed=7, logit_bias={3: 100.0, 9: 100.0}),
]


@pytest.mark.parametrize("vocab", [11, 32, 500, 1027])
def test_a_masked_row_is_the_row_without_what_is_forbidden(vocab):
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 4, (len(PARAMS), vocab)).astype(np.float32)
    sets = [rng.choice(vocab, rng.integers(1, vocab), replace=False) for _ in PARAMS]
    draws = [Draw(params, 5, (1, 2), (4, 4), (), mask_of(ids, vocab)) for params, ids in zip(PARAMS, sets, strict=True)]
    together = sample_rows(logits, draws, 2)
    for row, (draw, ids) in enumerate(zip(draws, sets, strict=True)):
        (alone,) = sample_rows(logits[row : row + 1], [draw])
        assert alone == together[row]
        assert alone.token in ids
        forbidden = logits[row : row + 1].copy()
        forbidden[0, np.setdiff1d(np.arange(vocab), ids)] = -np.inf
        (expected,) = sample_rows(forbidden, [replace(draw, allowed=None)])
        assert alone.token == expected.token
        if draw.params.logprobs is not None:  # of the model's own distribution, whatever is forbidden
            (own,) = sample_rows(logits[row : row + 1], [replace(draw, allowed=mask_of([alone.token], vocab))])
            scores = logits[row].astype(np.float64)
            assert own.logprob == alone.logprob
            assert alone.logprob == pytest.approx(scores[alone.token] - np.logaddexp.reduce(scores), abs=1e-6)


def test_rows_without_a_mask_keep_their_bits():
    logits = np.random.default_rng(0).normal(0, 4, (len(PARAMS), 500)).astype(np.float32)
    plain = [Draw(params, 5, (1, 2), (4, 4)) for params in PARAMS]
    alone = sample_rows(logits, plain)
    for masked in range(len(PARAMS)):
        draws = list(plain)
        draws[masked] = replace(draws[masked], allowed=mask_of([7], 500))
        mixed = sample_rows(logits, draws, 2)
        assert mixed[masked].token == 7
        assert [row for i, row in enumerate(mixed) if i != masked] == [row for i, row in enumerate(alone) if i != masked]


# --- the engine ------------------------------------------------------------------------------------------------------------


def job(name, grammar, *, seed=1, **more):
    return replace(request(name, 12, seed=seed, max_tokens=200, grammar=grammar, **more), ignore_eos=False)


@given(schemas(), st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_a_random_model_answers_any_schema(tiny_folder, tiny_model, schema, seed):
    rig = make_rig(tiny_folder, tiny_model)
    rig.add(job("a", json_grammar(schema), seed=seed))
    rig.run()
    if rig.outputs[-1].finish is FinishReason.STOP:
        jsonschema.validate(json.loads(rig.text("a")), schema)
    else:
        assert len(rig.tokens["a"]) == 200


def crowd(order=0):
    plain = [request(f"plain-{i}", 5 + 7 * i, max_tokens=40, seed=i or None, order=order + i) for i in range(3)]
    bound = [job(f"bound-{i}", json_grammar(PERSON), seed=i, order=order + 3 + i) for i in range(3)]
    return [*plain, *bound]


def test_company_changes_no_token(tiny_folder, tiny_model):
    """Neither of those with a grammar nor of those without."""
    together = make_rig(tiny_folder, tiny_model)
    for each in crowd():
        together.add(each)
    together.run()
    for each in crowd():
        alone = make_rig(tiny_folder, tiny_model)
        alone.add(each)
        assert alone.run()[each.sequence_id] == together.tokens[each.sequence_id]
        if each.grammar:
            jsonschema.validate(json.loads(together.text(each.sequence_id)), PERSON)


def test_it_ends_with_the_token_that_completes_it(tiny_folder, tiny_model):
    """Nothing but the end may follow, so that is not waited for: a model that knows none ends as well."""
    ends = {}
    for name, eos in (("with an end", frozenset({END})), ("without", frozenset())):
        rig = make_rig(tiny_folder, tiny_model)
        rig.engine._eos = eos
        rig.engine._grammars = Grammars(rig.engine._tokenizer, VOCAB_SIZE, eos)
        rig.add(job("a", json_grammar(PERSON)))
        rig.run()
        assert rig.outputs[-1].finish is FinishReason.STOP
        assert rig.text("a").endswith("}")
        ends[name] = rig.tokens["a"]
    assert ends["with an end"] == ends["without"]


def test_where_it_may_end_the_model_decides(tiny_folder, tiny_model):
    """And where the end must wait, it waits only while something else may come."""
    few = regex_grammar("[ab]{1,30}")
    likes_the_end = SamplingParams(seed=3, logit_bias={END: 100.0})
    lengths = {}
    for least in (0, 12, 100):
        rig = make_rig(tiny_folder, tiny_model)
        rig.add(replace(job("a", few), sampling=replace(likes_the_end, min_tokens=least)))
        rig.run()
        assert rig.outputs[-1].finish is FinishReason.STOP
        lengths[least] = rig.tokens["a"]
    assert lengths[0][1:] == [END]
    assert lengths[12].index(END) == 12
    assert END not in lengths[100]


def test_an_end_that_is_ignored_ends_a_grammar_all_the_same(tiny_folder, tiny_model):
    rig = make_rig(tiny_folder, tiny_model)
    likes_the_end = SamplingParams(seed=3, logit_bias={END: 100.0})
    rig.add(replace(job("a", regex_grammar("[ab]{1,30}")), sampling=likes_the_end, ignore_eos=True))
    rig.run()
    assert (rig.outputs[-1].token, rig.outputs[-1].finish, len(rig.tokens["a"])) == (END, FinishReason.STOP, 2)


def test_a_stop_string_cuts_it(tiny_folder, tiny_model):
    rig = make_rig(tiny_folder, tiny_model)
    rig.add(job("a", json_grammar(PERSON), stop=('"age"',)))
    rig.run()
    assert rig.outputs[-1].finish is FinishReason.STOP
    assert rig.text("a").endswith(",")


def test_no_bias_allows_what_it_forbids(tiny_folder, tiny_model):
    rig = make_rig(tiny_folder, tiny_model)
    rig.add(replace(job("a", regex_grammar("[ab]{5}")), sampling=SamplingParams(seed=3, logit_bias={END: 100.0, 70: 100.0})))
    rig.run()
    assert len(rig.text("a")) == 5


def test_one_that_becomes_too_complex_fails_alone(tiny_folder, tiny_model):
    """Its tokens so far are right and stay. Taken up again behind them, it fails in the same way."""
    alone = make_rig(tiny_folder, tiny_model)
    for each in crowd():
        alone.add(each)
    alone.run()
    rig = make_rig(tiny_folder, tiny_model)
    for each in crowd():
        rig.add(each)
    rig.add(job("too complex", json_grammar(TOO_COMPLEX), order=9))
    failures = []
    while rig.engine.has_work:
        failures += rig.step().failures
    ((name, error),) = [(failure.sequence_id, failure.error) for failure in failures]
    assert (name, error.code) == ("too complex", "grammar_failed")
    assert "items" in str(error)
    tokens = rig.tokens.pop(name)
    assert tokens
    assert rig.tokens == alone.tokens
    with pytest.raises(GrammarFailed, match="items"):
        rig.add(job("again", json_grammar(TOO_COMPLEX), generated_ids=tuple(tokens)))
    assert not rig.engine.has_work
    assert not rig.engine._grammar_states
