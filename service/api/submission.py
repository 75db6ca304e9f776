"""From a checked request to a job in the store: tokens, limits of model and engines, and a submit that survives lost replies."""

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from service.api.context import Context
from service.api.problems import IdempotencyConflict, InvalidRequest, JobTooLarge, ModelNotFound, QueueFull
from service.api.schemas import CompletionRequest, JobRequest, Sampling
from service.logs import get_logger
from service.tokenization import ChatTemplateError
from storage.errors import StoreUnavailable
from storage.job_spec import JobSpec
from storage.records import EngineRecord, NewJob, SubmitOutcome, Submitted

_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_log = get_logger("api.submission")

#: Random seeds stay below this, so that every JSON reader can give them back exactly.
SEED_LIMIT = 1 << 53
_SEEDS = 1 << 63


@dataclass(frozen=True, slots=True)
class Origin:
    """What a job keeps of the HTTP request that made it."""

    path: str
    request_id: str
    traceparent: str
    idempotency_key: str | None

    @classmethod
    def of(cls, request: Request) -> "Origin":
        key = request.headers.get("Idempotency-Key")
        if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
            raise InvalidRequest("Idempotency-Key must be 1 to 255 printable ASCII characters", param="Idempotency-Key")
        trace = request.headers.get("traceparent", "")
        return cls(
            path=request.url.path,
            request_id=request.state.request_id,
            traceparent=trace if _TRACEPARENT.fullmatch(trace) else "",
            idempotency_key=key,
        )


def check_model(context: Context, name: str | None) -> None:
    if name is not None and name not in context.model.names:
        raise ModelNotFound(f"model: this server has {context.model.name!r}, not {name[:200]!r}", param="model")


async def prompt_tokens(context: Context, request: JobRequest | CompletionRequest) -> tuple[tuple[int, ...], str]:
    """(token ids, the field they came from). A long text takes long, so it is tokenised in a thread."""
    tokenization = context.model.tokenization
    if isinstance(request, JobRequest) and request.messages is not None:
        messages = [message.plain() for message in request.messages]
        try:
            return tuple(await context.in_tokenizer_thread(lambda: tokenization.encode_chat(messages))), "messages"
        except ChatTemplateError as error:
            raise InvalidRequest(f"messages: {error}", param="messages") from None
    if isinstance(request.prompt, str):
        text = request.prompt
        tokens = await context.in_tokenizer_thread(lambda: tokenization.encode(text))
        if not tokens:
            raise InvalidRequest("prompt: this text gives no token", param="prompt")
        return tuple(tokens), "prompt"
    tokens = list(request.prompt)
    _check_vocabulary(tokens, tokenization.vocab_size)
    return tuple(tokens), "prompt"


def _check_vocabulary(tokens: Sequence[int], vocab_size: int) -> None:
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        index, token = next((i, token) for i, token in enumerate(tokens) if not 0 <= token < vocab_size)
        raise InvalidRequest(
            f"prompt[{index}]: {token} is not in the vocabulary, which has ids 0 to {vocab_size - 1}", param=f"prompt[{index}]"
        )


def fit(context: Context, num_prompt: int, max_tokens: int | None, field: str) -> int:
    """How many tokens the job may make. Raises what names the limit: of the context, or of the engines' pools."""
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
            f"max_tokens: {num_prompt} prompt tokens and {max_tokens} more are {num_prompt + max_tokens}; "
            f"the context holds {limit}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return _fit_pools(engines, num_prompt, max_tokens, limit - num_prompt)


def _fit_pools(engines: Sequence[EngineRecord], num_prompt: int, max_tokens: int | None, room: int) -> int:
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
            param="max_tokens" if num_prompt < largest else "prompt",
        )
    return max_tokens or min(room, largest - num_prompt)


def token_capacity(engine: EngineRecord) -> int:
    """Tokens (prompt and answer) of the largest job that this engine can claim: the last token's KV is never stored."""
    return engine.info.device_pages * engine.info.page_size + 1


def make_spec(context: Context, request: Sampling, max_tokens: int, *, metadata: Mapping[str, str], kind: str) -> JobSpec:
    vocab_size = context.model.tokenization.vocab_size
    bias = {int(token): value for token, value in request.logit_bias.items()}
    for token in bias:
        if token >= vocab_size:
            raise InvalidRequest(
                f"logit_bias: token {token} is not in the vocabulary, which has ids 0 to {vocab_size - 1}", param="logit_bias"
            )
    if request.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens: {request.min_tokens} is more than max_tokens ({max_tokens})", param="min_tokens")
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
    )


def request_hash(body: Mapping[str, Any], path: str, tenant: str = "") -> str:
    """PROTOCOL.md 7: of the parsed body, so that spaces and the order of names do not matter; path and tenant."""
    text = json.dumps([path, tenant, body], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def new_job_id(prefix: str) -> str:
    """128 random bits, made before the first submit: so a submit sent again finds itself."""
    return f"{prefix}{secrets.token_hex(16)}"


def group_of(job: NewJob, spec: JobSpec, n: int) -> tuple[NewJob, ...]:
    """``job`` and n - 1 more like it; its id names the group. Job i has the id ``ID-i``, and i is added to its seed."""
    if n == 1:
        return (job,)
    first = replace(job, group=job.job_id)
    others = (
        replace(first, job_id=f"{job.job_id}-{i}", spec=replace(spec, seed=(spec.seed + i) % _SEEDS).to_json()) for i in range(1, n)
    )
    return first, *others


async def submit(context: Context, *jobs: NewJob) -> Submitted:
    """Send the very same jobs until they are answered. Raises QueueFull, IdempotencyConflict and what ``storage.errors`` names."""
    loop = asyncio.get_running_loop()
    # Patience is for a reply that was lost, and for a Redis that restarts. One that has been away is for the client to wait for.
    away = context.view is not None and isinstance(context.view.error, StoreUnavailable)
    give_up = loop.time() + (0.0 if away else context.options.submit_timeout)
    pause = 0.05
    limit = context.options.queue_limit
    while True:
        try:
            answer = await context.store.run(lambda store: store.submit(*jobs, queue_limit=limit))
            break
        except StoreUnavailable as error:
            if loop.time() + pause > give_up or context.drain.draining:
                raise
            _log.info("submit_again", job_id=jobs[0].job_id, error=str(error))
        await asyncio.sleep(pause)
        pause = min(1.0, 2 * pause)
    if answer.outcome is SubmitOutcome.CONFLICT:
        raise IdempotencyConflict(
            "this Idempotency-Key came before with another request: use a new key for a new job", param="Idempotency-Key"
        )
    if answer.outcome is SubmitOutcome.FULL:
        raise QueueFull(f"no room in the queue for {len(jobs)} more: {limit} jobs may wait (--queue-limit); try again later")
    if is_replay(jobs[0], answer):
        context.metrics.idempotent_replays.inc()
    return answer


def is_replay(job: NewJob, answer: Submitted) -> bool:
    """An earlier request's job, and not the one (first of its group) that we made and heard of only at the second try."""
    return answer.outcome is SubmitOutcome.EXISTS and answer.job_ids[0] != job.job_id
