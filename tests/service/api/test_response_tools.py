"""Tools and reasoning in ``/v1/responses``, with the templates and special tokens of well-known models."""

import json

import openai
import pytest
from pydantic import BaseModel

from storage.job_spec import JobSpec
from tests.service.api.calls import claimed, in_thread
from tests.service.api.conftest import new_memory_store
from tests.service.api.rig import MODEL, ScriptedEngine, running_api
from tests.service.api.test_chat_tools import ARGUMENTS, HERMES_CALL, REASONING, SAID, pieces, prompt_of

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Now.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ADDED, DONE = "response.output_item.added", "response.output_item.done"
CALL_DELTA, CALL_DONE = "response.function_call_arguments.delta", "response.function_call_arguments.done"


@pytest.fixture
def served(models, request):
    """(kind, client, engine, tokenization) of the kind of model that the test names."""
    kind = getattr(request, "param", "qwen3")
    store = new_memory_store()
    with running_api(store, models(kind)) as api, openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as sdk:
        yield kind, sdk, ScriptedEngine(store, max_context=2048, device_pages=128), models(kind).tokenization


every_model = pytest.mark.parametrize("served", SAID, indirect=True)


def background(sdk, **more):
    return sdk.responses.create(**{"model": MODEL, "input": "Weather in Köln?", "background": True, "tools": [WEATHER], **more})


def answered(served, text, end="stop", **more):
    """A background response that said ``text``."""
    _, sdk, engine, tokenization = served
    made = background(sdk, **more)
    engine.claim_one(made.id)
    engine.say(made.id, pieces(tokenization, text), end)
    return sdk.responses.retrieve(made.id)


def replayed(sdk, response_id, **more):
    return [event.to_dict() for event in sdk.responses.retrieve(response_id, stream=True, **more)]


@every_model
def test_calls_are_items_of_the_output(served):
    kind, _, engine, tokenization = served
    response = answered(served, SAID[kind])
    assert "get_weather" in prompt_of(engine, response.id, tokenization)
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.name, call.arguments, call.status) for call in calls] == [("get_weather", ARGUMENTS, "completed")] * 2
    assert len({call.call_id for call in calls}) == len({call.id for call in calls}) == 2
    assert [item.content[0].text for item in response.output[:-2]] == ([REASONING[kind]] if kind in REASONING else [])
    assert (response.usage.output_tokens_details.reasoning_tokens > 0) == (kind in REASONING)
    echoed = response.tools[0].to_dict()
    assert {name: echoed[name] for name in WEATHER} == WEATHER
    assert (echoed["strict"], response.tool_choice, response.status) == (False, "auto", "completed")


@every_model
def test_a_stream_tells_each_item_as_it_comes_and_goes_on_behind_any_event(served):
    kind, sdk, _, _ = served
    response = answered(served, SAID[kind])
    events = replayed(sdk, response.id)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["item"]["type"] for event in events if event["type"] == ADDED] == [item.type for item in response.output]
    assert [event["item"] for event in events if event["type"] == DONE] == [item.to_dict() for item in response.output]
    assert events[-1]["response"] == response.to_dict()
    done = [event for event in events if event["type"] == CALL_DONE]
    for event in done:
        told = [one["delta"] for one in events if one["type"] == CALL_DELTA and one["item_id"] == event["item_id"]]
        assert len(told) > 1, "as they come, not at their end"
        assert "".join(told) == event["arguments"] == ARGUMENTS
    for after in range(len(events)):
        assert replayed(sdk, response.id, starting_after=after) == events[after + 1 :]


def test_reasoning_has_events_of_its_own(served):
    _, sdk, _, _ = served
    response = answered(served, "<think>\nhm, so\n</think>\n\nRain.", tools=[])
    reasoning, message = response.output
    assert (reasoning.type, reasoning.summary, reasoning.content[0].to_dict()) == (
        "reasoning", [], {"type": "reasoning_text", "text": "hm, so"},
    )  # fmt: skip
    assert (message.content[0].text, response.output_text) == ("Rain.", "Rain.")
    events = [event for event in replayed(sdk, response.id) if event.get("output_index") == 0]
    kinds = [event["type"] for event in events]
    assert kinds[:2] == [ADDED, "response.content_part.added"]
    assert kinds[-3:] == ["response.reasoning_text.done", "response.content_part.done", DONE]
    deltas = [event["delta"] for event in events[2:-3]]
    assert {*kinds[2:-3]} == {"response.reasoning_text.delta"}
    assert "".join(deltas) == events[-3]["text"] == "hm, so"


def test_text_between_calls_is_a_message_of_its_own(served):
    response = answered(served, f"I look.\n{HERMES_CALL}\nAnd again. {HERMES_CALL}")
    assert [item.type for item in response.output] == ["message", "function_call"] * 2
    assert len({item.id for item in response.output}) == 4
    assert [item.content[0].text for item in response.output[::2]] == ["I look.", "And again."]


def test_an_answer_that_says_nothing_is_an_empty_message(served):
    _, sdk, _, _ = served
    response = answered(served, "<|im_end|>")
    (message,) = response.output
    assert (message.type, message.content[0].text) == ("message", "")
    assert [event["type"] for event in replayed(sdk, response.id)][3:5] == [ADDED, "response.content_part.added"]


def test_a_call_that_is_cut_off(served):
    response = answered(served, HERMES_CALL[: HERMES_CALL.index("}")], "length")
    (call,) = response.output
    assert (call.arguments, call.status, response.status) == ('{"city": "Köln"', "incomplete", "incomplete")


class GetWeather(BaseModel):
    city: str


def test_the_helpers_of_the_sdk_take_tools_made_of_classes(served):
    _, sdk, engine, tokenization = served
    said = f"<think>hm</think>\n{HERMES_CALL.replace('get_weather', 'GetWeather')}"
    asked = {"model": MODEL, "input": "Weather?", "tools": [openai.pydantic_function_tool(GetWeather)]}

    def follow():
        with sdk.responses.stream(**asked) as stream:
            return list(stream), stream.get_final_response()

    wait = in_thread(follow)
    engine.say(claimed(engine), pieces(tokenization, said))
    events, streamed = wait()
    wait = in_thread(lambda: sdk.responses.parse(**asked))
    job_id = claimed(engine)
    engine.say(job_id, pieces(tokenization, said))
    for response in (streamed, wait()):
        assert [item.type for item in response.output] == ["reasoning", "function_call"]
        assert response.output[1].parsed_arguments == GetWeather(city="Köln")
    assert [event.snapshot for event in events if event.type == CALL_DELTA][-1] == ARGUMENTS
    assert "GetWeather" in JobSpec.from_json(engine.store.get(job_id).spec).grammar, "such tools are strict"


@every_model
def test_what_came_of_a_call_goes_back_into_the_template(served):
    """By the id of the response before, and by its items sent again: the same prompt."""
    kind, sdk, engine, tokenization = served
    said = SAID[kind].split("; ")[0] if kind == "llama" else SAID[kind]  # its template takes no two calls
    before = answered(served, said)
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
        for item in before.output
        if item.type == "function_call"
    ]
    chained = background(sdk, previous_response_id=before.id, input=outputs)
    sent = background(sdk, input=[{"role": "user", "content": "Weather in Köln?"}, *before.output, *outputs])
    prompt = prompt_of(engine, chained.id, tokenization)
    assert prompt == prompt_of(engine, sent.id, tokenization)
    assert prompt.count("rain") == len(outputs)
    name = "parameters" if kind == "llama" else "arguments"
    assert f'{{"name": "get_weather", "{name}": {ARGUMENTS}' in prompt, "an object, not JSON in a string"
    assert ("hm" in prompt) == (kind in REASONING)
    listed = list(sdk.responses.input_items.list(chained.id, order="asc"))
    assert [item.to_dict() for item in listed[1 : -len(outputs)]] == [item.to_dict() for item in before.output]
    assert [item.output for item in listed[-len(outputs) :]] == ["rain"] * len(outputs)
    assert len({item.id for item in listed}) == len(listed)


def test_an_output_needs_its_call(served):
    _, sdk, _, _ = served
    with pytest.raises(openai.BadRequestError) as caught:
        background(sdk, input=[{"type": "function_call_output", "call_id": "c", "output": "o"}])
    assert caught.value.param == "input[0].call_id"


def test_tools_that_are_not_to_be_called_are_no_tools(served):
    _, _, engine, tokenization = served
    response = answered(served, HERMES_CALL, tool_choice="none")
    assert "get_weather" not in prompt_of(engine, response.id, tokenization)
    assert response.output_text == HERMES_CALL


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}], ids=json.dumps)
def test_a_choice_is_given_back(served, choice):
    _, sdk, engine, _ = served
    response = background(sdk, tool_choice=choice)
    assert response.to_dict()["tool_choice"] == choice
    assert "get_weather" in JobSpec.from_json(engine.store.get(response.id).spec).grammar
