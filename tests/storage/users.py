"""The Redis users that we hand to operators (deploy/redis-users.acl), with passwords in place of the ones that nobody knows."""

import hashlib
from pathlib import Path

from tests.servers import RedisServer

SHIPPED = Path(__file__).parents[2] / "deploy" / "redis-users.acl"
OURS, OPERATOR = "midsentence", "operator"
NOBODY_KNOWS = f"#{'0' * 64}"
PASSWORD = "secret-of-the-test"


def write_users(path: Path) -> Path:
    text = SHIPPED.read_text()
    assert text.count(NOBODY_KNOWS) == 2
    path.write_text(text.replace(NOBODY_KNOWS, f"#{hashlib.sha256(PASSWORD.encode()).hexdigest()}"))
    return path


def url_of(server: RedisServer, user: str) -> str:
    return server.url.replace("unix://", f"unix://{user}:{PASSWORD}@", 1)
