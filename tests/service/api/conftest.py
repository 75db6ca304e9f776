import json
import uuid

import openai
import pytest

from storage.memory_store import MemoryJobStore
from storage.redis_store import RedisJobStore
from tests.servers import running_redis, valkey_binary
from tests.service.api.chat_models import chat_model
from tests.service.api.rig import ScriptedEngine, all_ended, running_api, served_model
from tests.tiny_models import MAX_CONTEXT, VOCAB_SIZE, _save_tokenizer


@pytest.fixture(scope="session", autouse=True)
def apis_end():
    yield
    assert all_ended(), "an api did not end after its drain"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """What the api reads of a model: no weights."""
    folder = tmp_path_factory.mktemp("model")
    _save_tokenizer(folder)
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_CONTEXT, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def model(model_folder):
    return served_model(model_folder)


@pytest.fixture(scope="session")
def valkey(tmp_path_factory):
    with running_redis(valkey_binary(), tmp_path_factory.mktemp("valkey")) as server:
        yield server


def open_redis_store(server, timeout=10.0):
    """A new store in this server, where nothing of other tests is left, and a client of it. It waits for its answers for as long
    as a busy disk holds them up."""
    flush(server)
    store = RedisJobStore(server.url, timeout=timeout)
    store.bind(store.create(uuid.uuid4().hex))
    return store


def new_memory_store():
    store = MemoryJobStore()
    store.bind(store.create("test"))
    return store


@pytest.fixture(params=["memory", "redis"])
def store(request):
    """Both stores, each new and empty."""
    if request.param == "memory":
        made = new_memory_store()
    else:
        made = open_redis_store(request.getfixturevalue("valkey"))
    yield made
    made.close()


def flush(server):
    import redis

    with redis.Redis.from_url(server.url) as client:
        client.flushall()


@pytest.fixture
def api(store, model):
    with running_api(store, model) as running:
        yield running


@pytest.fixture
def engine(store):
    return ScriptedEngine(store)


@pytest.fixture
def sdk(api):
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def memory_api(model):
    """For what does not depend on the kind of store."""
    with running_api(new_memory_store(), model) as running:
        yield running


@pytest.fixture(scope="module")
def refusing_api(model):
    """One for many requests, none of which makes a job."""
    with running_api(new_memory_store(), model) as running:
        yield running


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models by the kind of their chat template (``chat_models.TEMPLATES``), each made once."""
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = chat_model(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return get
