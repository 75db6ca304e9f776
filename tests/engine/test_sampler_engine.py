"""What the engine gives the sampler, and what it makes of a row that has no token."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.errors import InvalidLogits
from engine.sampler import Draw, SamplingParams, sample_rows
from tests.rigs import make_rig, request

PENALISED = SamplingParams(seed=4, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, logprobs=2, min_tokens=30)


class Recorded:
    """A runner that keeps the logits it gave; ``spoil`` may change them first."""

    def __init__(self, runner, spoil=lambda logits: None):
        self.runner, self.model, self.seen, self.spoil = runner, runner.model, [], spoil

    def run_chunk(self, *args, **kwargs):
        logits = self.runner.run_chunk(*args, **kwargs)
        return None if logits is None else self._keep(logits[None])[0]

    def run_rows(self, *args):
        return self._keep(self.runner.run_rows(*args))

    def _keep(self, logits):
        logits = torch.tensor(logits.numpy())
        self.spoil(logits)
        self.seen += list(logits.numpy())
        return logits


def record(rig, **options):
    rig.engine._runner = recorded = Recorded(rig.engine._runner, **options)
    return recorded


def test_penalties_see_prompt_and_output_wherever_a_job_begins(tiny_folder, tiny_model):
    job = replace(request("penalised", 20, max_tokens=25), sampling=PENALISED)
    whole = None
    for done in (0, 1, 9):
        rig = make_rig(tiny_folder, tiny_model)
        recorded = record(rig)
        rig.add(replace(job, generated_ids=tuple(whole[:done]) if whole else ()))
        tokens = rig.run()["penalised"]
        whole = whole or tokens
        assert tokens == whole
        eos = frozenset(tiny_model.eos_token_ids)
        for output, logits in zip(rig.outputs, recorded.seen, strict=True):
            draw = Draw(PENALISED, output.index, job.prompt_ids, whole[: output.index], eos)
            assert sample_rows(logits[None], [draw]) == [output.sampled]
        assert not rig.engine._histories


NAMES = ("first", "second", "third")


def three_jobs(folder, model):
    rig = make_rig(folder, model)
    for order, name in enumerate(NAMES):
        rig.add(request(name, 10, max_tokens=20, order=order))
    return rig


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("generated", [0, 1, 7, 19], ids="after {} tokens".format)
def test_logits_without_a_token_fail_their_sequence_alone(tiny_folder, tiny_model, generated, bad):
    alone = three_jobs(tiny_folder, tiny_model).run()
    rig = three_jobs(tiny_folder, tiny_model)
    while len(rig.tokens["second"]) < generated:
        rig.step()
    failures = []
    prompts = iter(NAMES)  # each prompt is one chunk, in their order

    def spoil(logits):
        row = 1 if generated else 0 if next(prompts) == "second" else None
        if row is not None:
            logits[row] = bad

    recorded = record(rig, spoil=spoil)
    while not failures:
        failures = rig.step().failures
    recorded.spoil = lambda logits: None
    tokens = rig.run()
    assert [failure.sequence_id for failure in failures] == ["second"]
    assert isinstance(failures[0].error, InvalidLogits)
    assert tokens == {**alone, "second": alone["second"][:generated]}
    assert rig.in_use == 0


@pytest.mark.parametrize("shape", [lambda rows: rows[:2], lambda rows: rows[:, :-1], lambda rows: rows[None]])
def test_logits_of_another_shape_are_a_bug_and_give_nobody_a_token(tiny_folder, tiny_model, shape):
    rig = three_jobs(tiny_folder, tiny_model)
    while len(rig.tokens["third"]) < 3:
        rig.step()
    recorded, told = record(rig), len(rig.outputs)
    recorded._keep = shape
    with pytest.raises(AssertionError, match="logits"):
        rig.step()
    assert len(rig.outputs) == told
