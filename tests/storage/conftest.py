"""One server process per binary for the whole folder; every test gets it empty."""

from collections.abc import Iterator

import pytest

from storage.job_store import JobStore
from tests.servers import DEBIAN_REDIS, VALKEY, RedisServer, debian_redis_binary, running_redis, valkey_binary
from tests.storage.backends import Backend, EngineUnderTest, MemoryBackend, RedisBackend, bound
from tests.storage.users import OPERATOR, OURS, url_of, write_users


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(valkey_binary(), tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def debian_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    binary = debian_redis_binary()
    if binary is None:
        pytest.skip("redis-server is not installed")
    with running_redis(binary, tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def valkey_with_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that knows the users of deploy/, and nobody else."""
    folder = tmp_path_factory.mktemp("users")
    with running_redis(valkey_binary(), folder, ("--aclfile", str(write_users(folder / "users.acl")))) as server:
        yield server


def _server(request: pytest.FixtureRequest) -> RedisServer:
    return request.getfixturevalue("valkey" if request.param == VALKEY else "debian_redis")


@pytest.fixture(params=["memory", VALKEY, "limited-user", pytest.param(DEBIAN_REDIS, marks=pytest.mark.redis)])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made: Backend
    if request.param == "memory":
        made = MemoryBackend()
    elif request.param == "limited-user":
        server = request.getfixturevalue("valkey_with_users")
        made = RedisBackend(request.param, server, url=url_of(server, OURS), operator_url=url_of(server, OPERATOR))
    else:
        made = RedisBackend(request.param, _server(request))
    yield made
    made.close()


@pytest.fixture(params=[VALKEY, pytest.param(DEBIAN_REDIS, marks=pytest.mark.redis)])
def redis_backend(request: pytest.FixtureRequest) -> Iterator[RedisBackend]:
    made = RedisBackend(request.param, _server(request))
    yield made
    made.close()


@pytest.fixture
def store(backend: Backend) -> JobStore:
    return bound(backend)


@pytest.fixture
def engine(store: JobStore) -> EngineUnderTest:
    made = EngineUnderTest(store)
    made.register()
    return made
