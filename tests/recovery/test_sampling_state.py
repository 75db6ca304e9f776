"""A job is taken up again at each of its tokens, from what the store has of it: the rest is what it would have been, to the bit.

Sampling keeps no state, so all of it must be in spec and log: seed and index, what penalties count, a stop string that has begun,
half a character, how long the end must wait, what a grammar allows next.
"""

import json
from dataclasses import replace

import jsonschema
import pytest
from tokenizers import Tokenizer

from recovery.sequences import commit_of, hold
from service.worker.state import take_in
from storage import chain
from storage.job_spec import JobSpec
from storage.records import Commit, JobStatus
from tests.json_schemas import json_grammar
from tests.lives import new_store
from tests.rigs import make_rig
from tests.storage.backends import EngineUnderTest, submit

TOKENS = 41  #: so that a job can be taken up behind each of its first forty
PROMPT = tuple(range(20, 41))
BASE = JobSpec("tiny", TOKENS, seed=11, ignore_eos=True)
#: Forty tokens or so: letters are tokens of their own to the tiny model.
ANSWER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 8, "maxLength": 10},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "minItems": 2, "maxItems": 2},
        "age": {"type": "integer", "minimum": 100, "maximum": 9999},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
SPECS = {
    "greedy": replace(BASE, temperature=0.0),
    "seeded": replace(BASE, temperature=1.1, top_k=60, top_p=0.9, min_p=0.01),
    "penalties": replace(BASE, temperature=0.8, repetition_penalty=1.3, presence_penalty=0.6, frequency_penalty=0.4),
    "logprobs": replace(BASE, temperature=0.9, logprobs=5),
    "half characters": replace(BASE, temperature=1.5),
    "the end must wait": replace(BASE, min_tokens=TOKENS - 1, ignore_eos=False),
    "a stop string": replace(BASE, temperature=0.9),
    "a grammar": replace(BASE, temperature=0.9, ignore_eos=False, grammar=json_grammar(ANSWER)),
}


def run(folder, model, spec, prefixes):
    """Jobs of one spec, each with so many tokens in its log already: the commits of the rest of each, in order."""
    store = new_store()
    engine = EngineUnderTest(store, page_size=4, device_pages=4000)
    engine.register()
    for entries in prefixes:
        submit(store, f"job-{len(entries)}", spec=spec.to_json(), prompt_token_ids=PROMPT, max_tokens=TOKENS)
    owned = engine.claim()
    owned += engine.claim(held=tuple(job.job_id for job in owned))  # one claim looks at 32
    for entries in prefixes:
        if entries:
            record = store.get(f"job-{len(entries)}")
            extended = chain.extend_all(record.chain, [entry.token for entry in entries])
            engine.write(Commit(record.job_id, record.fence, 0, extended, tuple(entries)))
    rig = make_rig(folder, model, pages=1024, max_running=len(prefixes), max_step_rows=256)
    helds = {}
    for taken in take_in(store, owned):
        held, request = hold(taken.owned, taken.record, taken.entries, "arithmetic")
        helds[held.job_id] = held
        assert rig.engine.add(request) == "".join(entry.text for entry in taken.entries)
    commits = {job_id: [] for job_id in helds}
    while rig.engine.has_work:
        for output in rig.engine.step().outputs:
            commits[output.sequence_id].append(commit_of(helds[output.sequence_id], output))
    return [commits[f"job-{len(entries)}"] for entries in prefixes]


def prepared(folder, model, name):
    """The spec, where it needs what only the model knows; and the answer of the uninterrupted job."""
    spec = SPECS[name]
    if name == "the end must wait":
        spec = replace(spec, logit_bias={model.eos_token_ids[0]: 100.0})
    if name == "half characters":
        pieces = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("🙂é").ids
        spec = replace(spec, logit_bias=dict.fromkeys(pieces, 100.0))
    (commits,) = run(folder, model, spec, [()])
    if name == "a stop string":
        text = "".join(commit.tokens[0].text for commit in commits)
        stop = next(text[at : at + 5] for at in range(len(text) - 12, 0, -1) if text.find(text[at : at + 5]) == at)
        spec = replace(spec, stop=(stop,))
        (commits,) = run(folder, model, spec, [()])
    return spec, commits


@pytest.mark.parametrize("name", SPECS)
def test_taken_up_at_any_token_the_rest_is_the_same(tiny_folder, tiny_model, name):
    spec, whole = prepared(tiny_folder, tiny_model, name)
    entries = [commit.tokens[0] for commit in whole]
    assert [bool(commit.finish) for commit in whole] == [False] * (len(whole) - 1) + [True]
    if name == "a stop string":
        assert len(whole) >= TOKENS - 15
        assert any(not entry.text for entry in entries), "nothing was held back"
        assert whole[-1].finish.status is JobStatus.COMPLETED
    elif name == "a grammar":
        assert len(whole) >= TOKENS - 5
        assert whole[-1].finish.finish_reason == "stop"
        jsonschema.validate(json.loads("".join(entry.text for entry in entries)), ANSWER)
    else:
        assert len(whole) == TOKENS
    if name == "half characters":
        assert any(not entry.text for entry in entries), "no character was spread over tokens"
        assert "�" in "".join(entry.text for entry in entries)
    if name == "the end must wait":
        assert (whole[-1].finish.finish_reason, entries[-1].token) == ("stop", tiny_model.eos_token_ids[0])
    if name == "logprobs":
        assert all(entry.logprobs for entry in entries)
    resumed = run(tiny_folder, tiny_model, spec, [tuple(entries[:done]) for done in range(1, len(entries))])
    for done, commits in enumerate(resumed, start=1):
        assert [commit.tokens[0] for commit in commits] == entries[done:], f"taken up behind token {done}"
        assert commits[-1].finish == whole[-1].finish
