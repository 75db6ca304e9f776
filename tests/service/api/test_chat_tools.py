"""Tools and reasoning, with the templates and special tokens of well-known models."""

import openai
import pytest

from storage.job_spec import JobSpec
from tests.service.api.calls import claimed, in_thread
from tests.service.api.conftest import new_memory_store
from tests.service.api.rig import MODEL, ScriptedEngine, running_api

CHAT = [{"role": "user", "content": "Weather in Köln?"}]
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Now.", "parameters": {"type": "object", "properties": {"city": {}}}},
}
ARGUMENTS = '{"city": "Köln"}'
HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
_BEGIN = '{"name": "get_weather", '
#: What each model says when it calls the tool: twice, where it can.
SAID = {
    "qwen3": f"<think>\nhm\n</think>\n\n{HERMES_CALL}\n{HERMES_CALL}",
    "hidden": f"<think>\nhm\n</think>\n\n{HERMES_CALL}\n{HERMES_CALL}",
    "mistral": f'[TOOL_CALLS] [{_BEGIN}"arguments": {ARGUMENTS}}}, {_BEGIN}"arguments": {ARGUMENTS}}}]',
    "llama": f'<|python_tag|>{_BEGIN}"parameters": {ARGUMENTS}}}; {_BEGIN}"parameters": {ARGUMENTS}}}',
}  # fmt: skip
REASONING = {"qwen3": "hm", "hidden": "hm"}


@pytest.fixture
def served(models, request):
    """(client, engine, tokenization, what a job's tokens show) of the kind of model that the test names."""
    kind = getattr(request, "param", "qwen3")
    store = new_memory_store()
    with running_api(store, models(kind)) as api, openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as sdk:
        yield kind, sdk, ScriptedEngine(store), models(kind).tokenization


every_model = pytest.mark.parametrize("served", SAID, indirect=True)


def pieces(tokenization, text):
    """Tokens and what each shows: as the engine's detokenizer has it, special tokens show nothing."""
    from engine.detokenizer import Detokenizer

    detokenizer, tokens = Detokenizer(tokenization._tokenizer), tokenization.encode_rendered(text)
    return [(token, detokenizer.push(token)) for token in tokens]


def prompt_of(engine, job_id, tokenization):
    return tokenization._tokenizer.decode(engine.store.get(job_id).prompt_token_ids, skip_special_tokens=False)


@every_model
def test_calls_of_a_whole_answer(served):
    kind, sdk, engine, tokenization = served
    wait = in_thread(lambda: sdk.chat.completions.create(model=MODEL, messages=CHAT, tools=[WEATHER]))
    job_id = claimed(engine)
    assert "get_weather" in prompt_of(engine, job_id, tokenization)
    engine.say(job_id, pieces(tokenization, SAID[kind]))
    answer = wait()
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content, getattr(choice.message, "reasoning_content", None)) == (None, REASONING.get(kind))
    assert [(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        ("function", "get_weather", ARGUMENTS)
    ] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert (answer.usage.completion_tokens_details.reasoning_tokens > 0) == (kind in REASONING)


@every_model
def test_calls_of_a_stream_are_those_of_the_whole(served):
    kind, sdk, engine, tokenization = served

    def follow():
        with sdk.chat.completions.stream(model=MODEL, messages=CHAT, tools=[WEATHER]) as stream:
            events = list(stream)
            return events, stream.get_final_completion().choices[0]

    wait = in_thread(follow)
    job_id = claimed(engine)
    engine.say(job_id, pieces(tokenization, SAID[kind]))
    events, choice = wait()
    whole = in_thread(lambda: sdk.chat.completions.create(model=MODEL, messages=CHAT, tools=[WEATHER]))
    other = claimed(engine)
    engine.say(other, pieces(tokenization, SAID[kind]))
    told = whole().choices[0]
    assert choice.finish_reason == told.finish_reason == "tool_calls"
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
        (c.function.name, c.function.arguments) for c in told.message.tool_calls
    ]
    pieces_of_arguments = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(pieces_of_arguments) > 2, "as they come, not at their end"


@every_model
def test_answers_of_tools_go_back_into_the_template(served):
    kind, sdk, engine, tokenization = served
    call = {"id": "abcdef012", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    history = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdef012", "content": "rain"},
    ]
    wait = in_thread(lambda: sdk.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER]))
    job_id = claimed(engine)
    prompt = prompt_of(engine, job_id, tokenization)
    assert "rain" in prompt
    name = "parameters" if kind == "llama" else "arguments"
    assert f'{{"name": "get_weather", "{name}": {ARGUMENTS}' in prompt, "an object, not JSON in a string"
    engine.say(job_id, pieces(tokenization, "It rains."))
    choice = wait().choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("It rains.", None, "stop")


@pytest.mark.parametrize("more", [{}, {"tools": [WEATHER], "tool_choice": "none"}], ids=["no tools", "none is to be called"])
def test_without_tools_nothing_is_a_call(served, more):
    _, sdk, engine, tokenization = served
    wait = in_thread(lambda: sdk.chat.completions.create(model=MODEL, messages=CHAT, **more))
    job_id = claimed(engine)
    assert "get_weather" not in prompt_of(engine, job_id, tokenization)
    engine.say(job_id, pieces(tokenization, HERMES_CALL))
    choice = wait().choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (HERMES_CALL, None, "stop")


def test_one_call_where_no_two_may_come(served):
    kind, sdk, engine, tokenization = served
    wait = in_thread(lambda: sdk.chat.completions.create(model=MODEL, messages=CHAT, tools=[WEATHER], parallel_tool_calls=False))
    engine.say(claimed(engine), pieces(tokenization, SAID[kind]))
    assert len(wait().choices[0].message.tool_calls) == 1


def test_an_answer_cut_off_amid_a_call(served):
    _, sdk, engine, tokenization = served
    wait = in_thread(lambda: sdk.chat.completions.create(model=MODEL, messages=CHAT, tools=[WEATHER]))
    engine.say(claimed(engine), pieces(tokenization, HERMES_CALL[: HERMES_CALL.index("}")]), end="length")
    choice = wait().choices[0]
    assert (choice.finish_reason, choice.message.tool_calls[0].function.arguments) == ("length", '{"city": "Köln"')


@pytest.mark.parametrize("served", ["r1"], indirect=True)
def test_reasoning_that_the_prompt_has_opened(served):
    _, sdk, engine, tokenization = served
    stream = sdk.chat.completions.create(model=MODEL, messages=CHAT, stream=True)
    job_id = claimed(engine)
    assert prompt_of(engine, job_id, tokenization).endswith("<think>\n")
    engine.say(job_id, pieces(tokenization, "Hm. So.\n</think>\n\nRain."))
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm. So."
    assert "".join(delta.content or "" for delta in deltas) == "Rain."


@pytest.mark.parametrize("served", ["r1"], indirect=True)
def test_a_template_without_tools_refuses_them(served):
    _, sdk, _, _ = served
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model=MODEL, messages=CHAT, tools=[WEATHER])
    assert caught.value.param == "tools"


def test_thinking_can_be_turned_off(served):
    _, sdk, engine, tokenization = served
    body = {"chat_template_kwargs": {"enable_thinking": False}}
    wait = in_thread(lambda: sdk.chat.completions.create(model=MODEL, messages=CHAT, extra_body=body))
    job_id = claimed(engine)
    assert prompt_of(engine, job_id, tokenization).endswith("<think>\n\n</think>\n\n")
    engine.say(job_id, pieces(tokenization, "Rain."))
    assert wait().choices[0].message.content == "Rain."


FORCED = [{"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}]


@every_model
@pytest.mark.parametrize("more", FORCED, ids=["required", "named"])
def test_a_call_that_must_come_is_the_grammar_of_its_job(served, more):
    kind, sdk, engine, tokenization = served
    wait = in_thread(lambda: sdk.chat.completions.create(model=MODEL, messages=CHAT, tools=[WEATHER], **more))
    job_id = claimed(engine)
    grammar = JobSpec.from_json(engine.store.get(job_id).spec).grammar
    state = tokenization.grammars.begin(grammar)
    text = SAID[kind].removeprefix("<|python_tag|>")  # the grammar has the form that the template asks for
    for token in tokenization.encode_rendered(text):
        assert state.allowed[token // 32] >> (token % 32) & 1, tokenization.token_text(token)
        tokenization.grammars.push([(state, token)])
    engine.say(job_id, pieces(tokenization, text))
    assert [call.function.arguments for call in wait().choices[0].message.tool_calls] == [ARGUMENTS] * 2


def test_a_tool_without_strict_binds_nothing(served):
    _, sdk, engine, tokenization = served
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    for tool, bound in ((WEATHER, False), (strict, True)):
        wait = in_thread(lambda tool=tool: sdk.chat.completions.create(model=MODEL, messages=CHAT, tools=[tool]))
        job_id = claimed(engine)
        assert bool(JobSpec.from_json(engine.store.get(job_id).spec).grammar) is bound
        engine.say(job_id, pieces(tokenization, "Rain."))
        assert wait().choices[0].message.content == "Rain."
