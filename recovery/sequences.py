"""A job record and its log, as the engine's Request; an engine's output, as the store's Commit."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.identity import root_identity
from engine.sampler import SamplingParams
from engine.sequence import FinishReason, Request
from storage import chain as chains
from storage.job_spec import JobSpec, unknown_fields
from storage.records import Commit, Finish, JobRecord, JobStatus, LogEntry, OwnedJob
from storage.rules import SUSPECT_STRIKES

if TYPE_CHECKING:  # the recovery plan must not wait two seconds for torch
    from engine.core import TokenOutput


class CannotGoOn(Exception):
    """This job, whatever else happens, can have no further right token. ``code`` is that of its failure."""

    code: str


class LogDamaged(CannotGoOn):
    """A job's log does not verify against its chain hash: damage outside the failure model, refused rather than papered over."""

    code = "log_damaged"


class SpecUnknown(CannotGoOn):
    """A newer version took the job in, and promised something that this one does not know."""

    code = "spec_unknown"


@dataclass(slots=True)
class Held:
    """A job that this incarnation owns, with what its next commit must prove."""

    owned: OwnedJob
    record: JobRecord
    spec: JobSpec
    log_length: int
    chain: str

    @property
    def job_id(self) -> str:
        return self.owned.job_id

    @property
    def resumed(self) -> bool:
        """It ran before, here or elsewhere."""
        return self.record.recoveries > 0 or self.record.log_length > 0


def verify_log(record: JobRecord, tokens: Iterable[int]) -> str:
    """Recompute the chain hash over the log. Raises LogDamaged, else returns the chain."""
    chain = chains.start(record.spec, record.prompt_token_ids, record.job_id)
    count = 0
    for token in tokens:
        chain = chains.extend(chain, token)
        count += 1
    if count != record.log_length or (record.chain and chain != record.chain):
        raise LogDamaged(f"{record.job_id}: {count} tokens in the log, {record.log_length} in the record, or another chain hash")
    return chain


def verify_spec(record: JobRecord) -> JobSpec:
    """What the client asked for. Raises SpecUnknown unless this version knows all of it."""
    if unknown := unknown_fields(record.spec):
        names = ", ".join(unknown)
        raise SpecUnknown(f"{record.job_id} asks for {names}, which this version of midsentence does not know: upgrade its engines")
    return JobSpec.from_json(record.spec)


def sampling_of(spec: JobSpec) -> SamplingParams:
    return SamplingParams(
        temperature=spec.temperature,
        top_k=spec.top_k,
        top_p=spec.top_p,
        min_p=spec.min_p,
        repetition_penalty=spec.repetition_penalty,
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        logit_bias=spec.logit_bias,
        seed=spec.seed,
        min_tokens=spec.min_tokens,
        logprobs=spec.logprobs,
    )


def hold(owned: OwnedJob, record: JobRecord, entries: Sequence[LogEntry], arithmetic: str) -> tuple[Held, Request]:
    """Everything needed to go on, under the fingerprint ``arithmetic``, with a job that was just given to us.

    A job that began under another arithmetic finds its old pages, which still verify, and publishes no new ones: their identity
    would promise an arithmetic that only part of them had. Raises CannotGoOn.
    """
    began_under = record.arithmetic_fingerprint or arithmetic
    spec = verify_spec(record)
    chain = verify_log(record, (entry.token for entry in entries))
    request = Request(
        sequence_id=record.job_id,
        prompt_ids=record.prompt_token_ids,
        sampling=sampling_of(spec),
        max_tokens=record.max_tokens,
        generated_ids=tuple(entry.token for entry in entries),
        stop=spec.stop,
        ignore_eos=spec.ignore_eos,
        grammar=spec.grammar,
        priority=record.priority,
        order=record.order,
        alone=owned.strikes >= SUSPECT_STRIKES,
        root=root_identity(record.model_fingerprint, began_under, record.tenant),
        publishes=began_under == arithmetic,
    )
    return Held(owned, record, spec, record.log_length, chain), request


def finish_of(reason: FinishReason, spec: JobSpec) -> Finish:
    """``length`` means cut short, unless the caller asked for exactly ``max_tokens`` by ignoring the end of text."""
    complete = reason is FinishReason.STOP or spec.ignore_eos
    return Finish(JobStatus.COMPLETED if complete else JobStatus.INCOMPLETE, reason.value)


def commit_of(held: Held, output: "TokenOutput") -> Commit:
    """The commit of one new token; moves ``held`` on to what the next one must prove."""
    entry = LogEntry(output.token, output.text, _logprobs_json(output))
    chain = chains.extend(held.chain, output.token)
    commit = Commit(
        job_id=held.job_id,
        fence=held.owned.fence,
        expected=held.log_length,
        chain=chain,
        tokens=(entry,),
        finish=None if output.finish is None else finish_of(output.finish, held.spec),
    )
    held.log_length += 1
    held.chain = chain
    return commit


def _logprobs_json(output: "TokenOutput") -> str:
    if output.sampled.logprob is None:
        return ""
    value = {"token": output.token, "logprob": output.sampled.logprob, "top": [[t, p] for t, p in output.sampled.top or ()]}
    return json.dumps(value, separators=(",", ":"))
