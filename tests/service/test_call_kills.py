"""A real service whose engine is killed amid the arguments of a call that must come: the same call, and one that fits."""

import json
import signal

import jsonschema
import openai
import pytest

from chaos.cluster import Cluster
from chaos.place import ClusterOptions
from tests.service.api.chat_models import QWEN3
from tests.tiny_models import make_tiny_model

NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 500, "maxLength": 510}, "stars": {"enum": [1, 2, 3]}},
    "required": ["text", "stars"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "note", "parameters": NOTE, "strict": True}
ASKED = {
    "model": "calls", "input": "Note it.", "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False,
    "extra_body": {"seed": 7},
}  # fmt: skip
DELTA = "response.function_call_arguments.delta"
KILLED_AT = 3  #: pieces of the arguments: the client is behind the engine by some, and it is to die in the middle


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "calls", max_position_embeddings=1024)
    (folder / "chat_template.jinja").write_text(QWEN3.replace("</think>", ""))  # as of a model that does not reason
    with Cluster(tmp_path_factory.mktemp("calls") / "c", ClusterOptions(str(folder))) as cluster:
        cluster.serve()
        yield cluster
        assert cluster.stop() == 0


def test_a_call_goes_on_where_its_engine_died(cluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        (uninterrupted,) = client.responses.create(**ASKED).output
        pieces = []
        for event in client.responses.create(**ASKED, stream=True):
            if event.type == DELTA:
                pieces.append(event.delta)
                if len(pieces) == KILLED_AT:
                    cluster.signal("engine", signal.SIGKILL)
    response = event.response
    (call,) = response.output
    assert (response.status, response.to_dict()["recovery"]["count"]) == ("completed", 1)
    assert (call.name, call.arguments) == (uninterrupted.name, uninterrupted.arguments)
    assert "".join(pieces) == call.arguments
    assert len(pieces) > 2 * KILLED_AT, "it was to die in the middle"
    jsonschema.validate(json.loads(call.arguments), NOTE)
