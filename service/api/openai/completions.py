"""``POST /v1/completions``: OpenAI's legacy shape, with vLLM's extra sampling fields. One job for each choice of each prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.api import openapi, submission
from service.api.context import Context
from service.api.openai.canceller import Canceller
from service.api.openai.choices import ChoiceEvents, wants_usage
from service.api.openai.completion_answers import CompletionShape
from service.api.openai.surface import Output, RequestJobs, create
from service.api.schemas import CompletionRequest, validate
from service.api.tailer import Tailer
from storage.records import NewJob

PREFIX = "cmpl-"


def completion_routes(context: Context, tailer: Tailer) -> APIRouter:
    router = APIRouter(tags=["openai"])
    canceller, surface = Canceller(context), Completions(context)

    @router.post(surface.path, **openapi.CREATE_COMPLETION)
    async def create_completion(request: Request) -> Response:
        """OpenAI's Completions, with vLLM's top_k, min_p, repetition_penalty, min_tokens and ignore_eos.

        Each choice is a job: the first has the answer's id, choice i that id with "-i" appended. Of several prompts each gets n
        choices, in the order of the prompts, and the same ones as in a request of its own.
        """
        return await create(context, tailer, canceller, surface, request)

    return router


class Completions:
    path, prefix = "/v1/completions", PREFIX

    def __init__(self, context: Context) -> None:
        self._context = context
        self._shape = CompletionShape(context.model)

    async def jobs(self, body: Mapping[str, Any], origin: submission.Origin, job_id: str | None = None) -> tuple[NewJob, ...]:
        context, asked = self._context, validate(CompletionRequest, body)
        submission.check_model(context, asked.model)
        submission.check_length(sum(len(prompt) for prompt in asked.prompt if isinstance(prompt, str)), context, "prompt")
        grammar = await submission.grammar(context, asked.response_format)
        hashed, job_id = submission.request_hash(body, origin), job_id or submission.new_job_id(PREFIX)
        jobs: list[NewJob] = []
        for number, prompt in enumerate(asked.prompt):
            field = f"prompt[{number}]" if len(asked.prompt) > 1 else "prompt"
            tokens = await submission.prompt_tokens(context, prompt, field)
            submission.fit(context, len(tokens), asked.max_tokens, field)
            spec = submission.make_spec(context, asked, asked.max_tokens, metadata={}, kind="completion", grammar=grammar)
            asked_for: dict[str, Any] = {"prompt": number} if number else {}
            if asked.echo:
                asked_for["echo"] = prompt if isinstance(prompt, str) else context.model.tokenization.text(prompt)
            spec = replace(spec, request=asked_for)
            job = submission.new_job(context, asked, origin, hashed, job_id, tokens, spec)
            jobs += [job, *submission.others_like(job, spec, asked.n)]
        return submission.grouped(jobs)

    def answer(self, outputs: Sequence[Output]) -> dict[str, Any]:
        return self._shape.whole(outputs)

    def events(self, jobs: RequestJobs, body: Mapping[str, Any]) -> ChoiceEvents:
        return ChoiceEvents(self._shape, jobs, include_usage=wants_usage(body))
