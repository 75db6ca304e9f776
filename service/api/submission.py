"""From a checked request to a job in the store: tokens, limits of model and engines, and a submit that survives lost replies."""

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import Request

from service.api.context import Context
from service.api.formats import ResponseFormat, TextFormat, grammar_of
from service.api.problems import IdempotencyConflict, InvalidRequest, JobTooLarge, ModelNotFound, QueueFull
from service.api.schemas import JobRequest, Sampling
from service.logs import get_logger
from service.tokenization import ChatTemplateError
from storage.errors import StoreUnavailable
from storage.job_spec import JobSpec
from storage.job_store import JobStore
from storage.records import EngineRecord, NewJob, SubmitOutcome, Submitted

_T = TypeVar("_T")

_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_log = get_logger("api.submission")

#: Random seeds stay below this, so that every JSON reader can give them back exactly.
SEED_LIMIT = 1 << 53
_SEEDS = 1 << 63


@dataclass(frozen=True, slots=True)
class Origin:
    """What a job keeps of the HTTP request that made it."""

    tenant: str
    path: str
    request_id: str
    traceparent: str
    idempotency_key: str | None

    @classmethod
    def of(cls, request: Request) -> "Origin":
        key = request.headers.get("Idempotency-Key")
        if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
            raise InvalidRequest("Idempotency-Key must be 1 to 255 printable ASCII characters", param="Idempotency-Key")
        return cls(
            tenant=request.state.tenant,
            path=request.url.path,
            request_id=request.state.request_id,
            traceparent=request.state.traceparent,
            idempotency_key=key,
        )


def check_model(context: Context, name: str | None) -> None:
    if name is not None and name not in context.model.names:
        raise ModelNotFound(f"model: this server has {context.model.name!r}, not {name[:200]!r}", param="model")


async def job_tokens(context: Context, request: JobRequest) -> tuple[tuple[int, ...], str]:
    """(token ids, the field they came from)."""
    if request.messages is not None:
        return await chat_tokens(context, [message.plain() for message in request.messages], "messages"), "messages"
    return await prompt_tokens(context, request.prompt, "prompt"), "prompt"


async def prompt_tokens(context: Context, prompt: str | Sequence[int], field: str) -> tuple[int, ...]:
    """Token ids of text or token ids that came in ``field``. A long text takes long, so it is tokenised in a thread."""
    tokenization = context.model.tokenization
    if not isinstance(prompt, str):
        _check_vocabulary(prompt, tokenization.vocab_size, field)
        return tuple(prompt)
    check_length(len(prompt), context, field)
    tokens = await context.in_tokenizer_thread(lambda: tokenization.encode(prompt))
    if not tokens:
        raise InvalidRequest(f"{field}: this text gives no token", param=field)
    return tuple(tokens)


async def chat_tokens(context: Context, messages: Sequence[Mapping[str, str]], field: str) -> tuple[int, ...]:
    """Token ids of a chat that came in ``field``."""
    tokenization = context.model.tokenization
    check_length(sum(len(text) for message in messages for text in message.values()), context, field)
    try:
        return tuple(await context.in_tokenizer_thread(lambda: tokenization.encode_chat(messages)))
    except ChatTemplateError as error:
        raise InvalidRequest(f"{field}: {error}", param=field) from None


def check_length(num_chars: int, context: Context, field: str) -> None:
    """Before any work is done for it: tokenising takes as long as the text is long."""
    limit = context.options.max_prompt_chars
    if num_chars > limit:
        message = f"{field}: {num_chars} characters are more than this server takes: {limit} (--max-prompt-chars)"
        raise InvalidRequest(message, param=field, code="prompt_too_long")


def _check_vocabulary(tokens: Sequence[int], vocab_size: int, field: str) -> None:
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        index, token = next((i, token) for i, token in enumerate(tokens) if not 0 <= token < vocab_size)
        raise InvalidRequest(
            f"{field}[{index}]: {token} is not in the vocabulary, which has ids 0 to {vocab_size - 1}", param=f"{field}[{index}]"
        )


def fit(context: Context, num_prompt: int, max_tokens: int | None, field: str, limit_field: str = "max_tokens") -> int:
    """How many tokens the job may make. Raises what names the limit: of the context, or of the engines' pools.

    ``field``, ``limit_field``: where the prompt and ``max_tokens`` came from.
    """
    engines = context.engines_of_model()
    limit = context.model.tokenization.context_length
    if engines:
        limit = min(limit, max(engine.info.max_context for engine in engines))
    if num_prompt >= limit:
        raise InvalidRequest(
            f"{field}: the prompt has {num_prompt} tokens; the context holds {limit}, answer included",
            param=field,
            code="context_length_exceeded",
        )
    if max_tokens is not None and num_prompt + max_tokens > limit:
        raise InvalidRequest(
            f"{limit_field}: {num_prompt} prompt tokens and {max_tokens} more are {num_prompt + max_tokens}; "
            f"the context holds {limit}",
            param=limit_field,
            code="context_length_exceeded",
        )
    return _fit_pools(engines, num_prompt, max_tokens, limit - num_prompt, field, limit_field)


def _fit_pools(
    engines: Sequence[EngineRecord], num_prompt: int, max_tokens: int | None, room: int, field: str, limit_field: str
) -> int:
    """Without any engine known, a job is taken in trust: it waits for one."""
    largest = max((token_capacity(engine) for engine in engines), default=None)
    if largest is None:
        return max_tokens or room
    wanted = num_prompt + (max_tokens or 1)
    if wanted > largest:
        biggest = max(engines, key=token_capacity).info
        raise JobTooLarge(
            f"prompt and answer are {wanted} tokens, and the largest engine can hold {largest} for one job "
            f"({biggest.device_pages} pages of {biggest.page_size} tokens): start one with more --device-pages, or ask for less",
            param=limit_field if num_prompt < largest else field,
        )
    return max_tokens or min(room, largest - num_prompt)


def token_capacity(engine: EngineRecord) -> int:
    """Tokens (prompt and answer) of the largest job that this engine can claim: the last token's KV is never stored."""
    return engine.info.device_pages * engine.info.page_size + 1


async def grammar(context: Context, wanted: ResponseFormat | TextFormat | None, field: str = "response_format") -> str:
    """``JobSpec.grammar``, and proof that it compiles: in a thread, since a schema takes long when its author means it to."""
    if wanted is None:
        return ""
    return await context.in_tokenizer_thread(lambda: grammar_of(wanted, context.model.tokenization.grammars, field))


def make_spec(
    context: Context, request: Sampling, max_tokens: int, *, metadata: Mapping[str, str], kind: str, grammar: str = ""
) -> JobSpec:
    vocab_size = context.model.tokenization.vocab_size
    bias = {int(token): value for token, value in request.logit_bias.items()}
    for token in bias:
        if token >= vocab_size:
            raise InvalidRequest(
                f"logit_bias: token {token} is not in the vocabulary, which has ids 0 to {vocab_size - 1}", param="logit_bias"
            )
    if request.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens: {request.min_tokens} is more than max_tokens ({max_tokens})", param="min_tokens")
    if grammar and request.ignore_eos:
        raise InvalidRequest("ignore_eos: a text that has to have a form ends where that does", param="ignore_eos")
    return JobSpec(
        model=context.model.name,
        max_tokens=max_tokens,
        # Samplers count upwards from the seed: a negative one is the same as a large one.
        seed=secrets.randbelow(SEED_LIMIT) if request.seed is None else request.seed % _SEEDS,
        temperature=request.temperature,
        top_k=max(0, request.top_k),
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=bias,
        min_tokens=request.min_tokens,
        logprobs=request.logprobs,
        stop=request.stops,
        ignore_eos=request.ignore_eos,
        metadata=dict(metadata),
        kind=kind,
        grammar=grammar,
    )


def request_hash(body: Mapping[str, Any], origin: Origin) -> str:
    """PROTOCOL.md 7: of the parsed body, so that spaces and the order of names do not matter; path and tenant."""
    text = json.dumps([origin.path, origin.tenant, body], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def new_job(
    context: Context,
    request: Sampling,
    origin: Origin,
    hash_of_request: str,
    job_id: str,
    tokens: tuple[int, ...],
    spec: JobSpec,
    *,
    stored: bool = False,
) -> NewJob:
    """The job that a checked request asks for, whatever endpoint it came to."""
    return NewJob(
        job_id=job_id,
        spec=spec.to_json(),
        prompt_token_ids=tokens,
        model_fingerprint=context.model.fingerprint,
        max_tokens=spec.max_tokens,
        request_hash=hash_of_request,
        priority=request.priority,
        deadline_seconds=request.deadline_seconds,
        tenant=origin.tenant,
        idempotency_key=origin.idempotency_key,
        request_id=origin.request_id,
        traceparent=origin.traceparent,
        stored=stored,
    )


def new_job_id(prefix: str) -> str:
    """128 random bits, made before the first submit: so a submit sent again finds itself."""
    return f"{prefix}{secrets.token_hex(16)}"


def group_of(job: NewJob, spec: JobSpec, n: int) -> tuple[NewJob, ...]:
    """``job`` and n - 1 more like it, with i added to the seed of job i."""
    return grouped([job, *others_like(job, spec, n)])


def others_like(job: NewJob, spec: JobSpec, n: int) -> Iterator[NewJob]:
    for i in range(1, n):
        yield replace(job, spec=replace(spec, seed=(spec.seed + i) % _SEEDS).to_json())


def grouped(jobs: Sequence[NewJob]) -> tuple[NewJob, ...]:
    """One group, which the id of the first names: job i has the id ``ID-i``."""
    first = jobs[0].job_id
    if len(jobs) == 1:
        return tuple(jobs)
    return tuple(replace(job, job_id=f"{first}-{i}" if i else first, group=first) for i, job in enumerate(jobs))


async def submit(context: Context, *jobs: NewJob) -> Submitted:
    """Raises RateLimited, QueueFull, IdempotencyConflict and what ``storage.errors`` names."""
    context.rates.take(jobs[0].tenant, sum(len(job.prompt_token_ids) + job.max_tokens for job in jobs))
    limit, tenant_limit = context.options.queue_limit, context.options.tenant_queue_limit
    answer = await until_answered(context, lambda store: store.submit(*jobs, queue_limit=limit, tenant_limit=tenant_limit))
    if answer.outcome is SubmitOutcome.CONFLICT:
        raise IdempotencyConflict(
            "this Idempotency-Key came before with another request: use a new key for a new job", param="Idempotency-Key"
        )
    if answer.outcome is SubmitOutcome.FULL:
        raise QueueFull(f"no room in the queue for {len(jobs)} more: {limit} jobs may wait (--queue-limit); try again later")
    if answer.outcome is SubmitOutcome.TENANT_FULL:
        raise QueueFull(
            f"no room for {len(jobs)} more of yours: {tenant_limit} jobs of one tenant may wait (--tenant-queue-limit)",
            code="tenant_queue_full",
        )
    if is_replay(jobs[0], answer):
        context.metrics.idempotent_replays.inc()
    return answer


async def until_answered(context: Context, call: Callable[[JobStore], _T]) -> _T:
    """Send the very same call until it is answered: one that may be sent twice. Raises what ``storage.errors`` names."""
    loop = asyncio.get_running_loop()
    # Patience is for a reply that was lost, and for a Redis that restarts. One that has been away is for the client to wait for.
    away = context.view is not None and isinstance(context.view.error, StoreUnavailable)
    give_up = loop.time() + (0.0 if away else context.options.submit_timeout)
    pause = 0.05
    while True:
        try:
            return await context.store.run(call)
        except StoreUnavailable as error:
            if loop.time() + pause > give_up or context.drain.draining:
                raise
            _log.info("sent_again", error=str(error))
        await asyncio.sleep(pause)
        pause = min(1.0, 2 * pause)


def is_replay(job: NewJob, answer: Submitted) -> bool:
    """An earlier request's job, and not the one (first of its group) that we made and heard of only at the second try."""
    return answer.outcome is SubmitOutcome.EXISTS and answer.job_ids[0] != job.job_id
