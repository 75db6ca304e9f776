"""``POST /v1/chat/completions``: a chat becomes a prompt by the model's own template, and its answer parts by the same. One job for
each choice."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.api import submission
from service.api.context import Context
from service.api.openai import chat_openapi
from service.api.openai.answer_grammar import answer_grammar
from service.api.openai.canceller import Canceller
from service.api.openai.chat_answers import ChatShape
from service.api.openai.chat_requests import ChatRequest
from service.api.openai.chat_stored import KIND, PREFIX, StoredChats
from service.api.openai.choices import ChoiceEvents, Json, wants_usage
from service.api.openai.readings import expected_to_json
from service.api.openai.surface import Output, RequestJobs, create
from service.api.openai.template import ChatTemplate
from service.api.schemas import validate
from service.api.tailer import Tailer
from storage.records import NewJob


def chat_routes(context: Context, tailer: Tailer) -> APIRouter:
    router = APIRouter(tags=["openai"])
    canceller, surface = Canceller(context), ChatCompletions(context)
    stored = StoredChats(context, ChatShape(context.model))

    @router.post(surface.path, **chat_openapi.CREATE_CHAT_COMPLETION)
    async def create_chat_completion(request: Request) -> Response:
        """OpenAI's Chat Completions, with vLLM's extra sampling fields.

        Each choice is a job: the first has the answer's id, choice i that id with "-i" appended.
        """
        return await create(context, tailer, canceller, surface, request)

    @router.get(surface.path, **chat_openapi.LIST_CHAT_COMPLETIONS)
    async def list_chat_completions(request: Request) -> Response:
        """Completions that were made with `store`."""
        return await stored.page(request)

    @router.get(f"{surface.path}/{{completion_id}}", **chat_openapi.GET_CHAT_COMPLETION)
    async def get_chat_completion(request: Request, completion_id: str) -> Response:
        return await stored.get(request, completion_id)

    @router.get(f"{surface.path}/{{completion_id}}/messages", **chat_openapi.LIST_CHAT_MESSAGES)
    async def list_chat_messages(request: Request, completion_id: str) -> Response:
        """The messages that were sent."""
        return await stored.messages(request, completion_id)

    @router.post(f"{surface.path}/{{completion_id}}", **chat_openapi.UPDATE_CHAT_COMPLETION)
    async def update_chat_completion(request: Request, completion_id: str) -> Response:
        """Its metadata, in place of what it had."""
        return await stored.update(request, completion_id)

    @router.delete(f"{surface.path}/{{completion_id}}", **chat_openapi.DELETE_CHAT_COMPLETION)
    async def delete_chat_completion(request: Request, completion_id: str) -> Response:
        return await stored.delete(request, completion_id)

    return router


class ChatCompletions:
    path, prefix = "/v1/chat/completions", PREFIX

    def __init__(self, context: Context) -> None:
        self._context = context
        self._shape = ChatShape(context.model)
        self._template = ChatTemplate(context)

    async def jobs(self, body: Mapping[str, Any], origin: submission.Origin, job_id: str | None = None) -> tuple[NewJob, ...]:
        context, asked = self._context, validate(ChatRequest, body)
        submission.check_model(context, asked.model)
        use, messages = asked.tool_use, [message.for_template(self._template.developer) for message in asked.messages]
        prompt = await self._template.prompt(messages, use, asked.template_switches, "messages")
        max_tokens = submission.fit(context, len(prompt.tokens), asked.token_limit, "messages", asked.limit_field)
        grammar = await answer_grammar(context, asked.response_format, "response_format", prompt.expected, use)
        spec = submission.make_spec(context, asked, max_tokens, metadata=asked.metadata, kind=KIND, grammar=grammar)
        spec = replace(spec, logprobs=asked.num_logprobs, request={"parts": expected_to_json(prompt.expected)})
        kept: Json = {"store": True, "n": asked.n, "messages": body["messages"]} if asked.store else {}
        first = replace(spec, request=spec.request | kept)  # of a group this alone: a chat can be long
        hashed, job_id = submission.request_hash(body, origin), job_id or submission.new_job_id(PREFIX)
        job = submission.new_job(context, asked, origin, hashed, job_id, prompt.tokens, first, stored=asked.store)
        return submission.group_of(job, spec, asked.n)

    def answer(self, outputs: Sequence[Output]) -> Json:
        return self._shape.whole(outputs)

    def events(self, jobs: RequestJobs, body: Mapping[str, Any]) -> ChoiceEvents:
        return ChoiceEvents(self._shape, jobs, include_usage=wants_usage(body))
