"""``POST /v1/completions``: OpenAI's legacy shape, as a thin layer on the same jobs: one for each choice.

A plain completion belongs to its HTTP request: its jobs name this api process, and when the client goes away they are cancelled.
With an Idempotency-Key the client has said that it may come back: the jobs go on, and the same request gets the same answer.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.api import submission
from service.api.canceller import Canceller
from service.api.completion_answers import CompletionEvents, CompletionShape, WholeCompletion
from service.api.context import Context
from service.api.edge import read_body
from service.api.schemas import CompletionRequest, parse_json, validate
from service.api.streams import EventStream
from service.api.tailer import Tailer
from storage.errors import StoreUnavailable
from storage.records import NewJob

COMPLETION_PREFIX = "cmpl-"


def completion_routes(context: Context, tailer: Tailer) -> APIRouter:
    router = APIRouter(tags=["openai"])
    body = {"required": True, "content": {"application/json": {"schema": CompletionRequest.model_json_schema()}}}
    canceller = Canceller(context)

    @router.post("/v1/completions", openapi_extra={"requestBody": body})
    async def create(request: Request) -> Response:
        """OpenAI's Completions, with vLLM's top_k, min_p, repetition_penalty, min_tokens and ignore_eos.

        Each choice is a job: the first has the answer's id, choice i that id with "-i" appended.
        """
        return await _create(context, tailer, canceller, request)

    return router


async def _create(context: Context, tailer: Tailer, canceller: Canceller, request: Request) -> Response:
    origin = submission.Origin.of(request)
    body = parse_json(await read_body(request, context.options.max_body_bytes))
    asked = validate(CompletionRequest, body)
    jobs = await _jobs(context, asked, origin, submission.request_hash(body, origin.path))
    plain = canceller if jobs[0].served_by else None
    try:
        answer = await submission.submit(context, *jobs)
    except StoreUnavailable:
        if plain is not None:  # the jobs may be there all the same, and their client will not hear of them
            for job in jobs:
                plain.cancel(job.job_id)
        raise
    shape = CompletionShape(context, answer.job_ids, plain, logprobs_asked=asked.logprobs is not None)
    response: Response
    if asked.stream:
        usage = asked.stream_options is not None and asked.stream_options.include_usage
        response = EventStream(context, tailer, shape.job_ids, 0, CompletionEvents(shape, usage))
    else:
        response = WholeCompletion(context, tailer, shape)
    if submission.is_replay(jobs[0], answer):
        response.headers["Idempotent-Replayed"] = "true"
    return response


async def _jobs(context: Context, asked: CompletionRequest, origin: submission.Origin, request_hash: str) -> tuple[NewJob, ...]:
    submission.check_model(context, asked.model)
    tokens, field = await submission.prompt_tokens(context, asked)
    max_tokens = submission.fit(context, len(tokens), asked.max_tokens, field)
    spec = submission.make_spec(context, asked, max_tokens, metadata={}, kind="completion")
    job = NewJob(
        job_id=submission.new_job_id(COMPLETION_PREFIX),
        spec=spec.to_json(),
        prompt_token_ids=tokens,
        model_fingerprint=context.model.fingerprint,
        max_tokens=max_tokens,
        request_hash=request_hash,
        idempotency_key=origin.idempotency_key,
        request_id=origin.request_id,
        traceparent=origin.traceparent,
        served_by="" if origin.idempotency_key else context.incarnation,
    )
    return submission.group_of(job, spec, asked.n)
