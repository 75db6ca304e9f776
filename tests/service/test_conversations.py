"""A conversation on a real engine: each response finds the pages of those before it."""

import openai
import pytest

from service.api.context import ServedModel
from service.tokenization import Tokenization
from tests.lives import life, new_store
from tests.rigs import CHUNK
from tests.service.api.rig import running_api

LONG = "the server that dies in the middle of a sentence goes on from where it was. "
SAMPLING = {"max_output_tokens": 8, "temperature": 0}


@pytest.fixture
def client(tiny_folder, tiny_model):
    store = new_store()
    engine = life(tiny_folder, tiny_model, store)
    served = ServedModel(("tiny",), "model", Tokenization(tiny_folder))
    with running_api(store, served) as api, openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk
    engine.crash()


def test_a_successor_is_computed_from_where_it_differs(client):
    first = client.responses.create(input=LONG * 4, **SAMPLING)
    assert first.usage.input_tokens > 2 * CHUNK, "shorter than what is shared"
    assert first.usage.input_tokens_details.cached_tokens == 0
    second = client.responses.create(input="and then?", previous_response_id=first.id, **SAMPLING)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= CHUNK
    client.responses.delete(first.id)
    third = client.responses.create(input="and then?", previous_response_id=second.id, **SAMPLING)
    assert third.usage.input_tokens_details.cached_tokens >= second.usage.input_tokens_details.cached_tokens


def test_a_chain_is_the_conversation_that_it_stands_for(client):
    """The answer is that to the same messages, sent at once."""
    first = client.responses.create(input="Once upon a time", instructions="be brief", **SAMPLING)
    second = client.responses.create(input="and then?", previous_response_id=first.id, **SAMPLING)
    messages = [{"role": "user", "content": "Once upon a time"}, *first.output, {"role": "user", "content": "and then?"}]
    assert client.responses.create(input=messages, **SAMPLING).output_text == second.output_text != ""
