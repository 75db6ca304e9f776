"""How fast a tenant may ask: 429, when to come back, and OpenAI's headers."""

import pytest

from service.api.problems import RateLimited
from service.api.rates import Rates
from tests.service.api.conftest import new_memory_store
from tests.service.api.rig import PROMPT, running_api


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_minutes_worth_at_once_then_as_it_comes_back():
    clock = Clock()
    rates = Rates(requests=60, tokens=None, clock=clock)
    for _ in range(60):
        rates.take("a", tokens=10**9)
    with pytest.raises(RateLimited) as caught:
        rates.take("a", tokens=1)
    assert caught.value.extra["retry_after"] == 1
    rates.take("b", tokens=1)
    clock.now += 1
    rates.take("a", tokens=1)
    with pytest.raises(RateLimited):
        rates.take("a", tokens=1)


def test_what_is_refused_takes_nothing():
    rates = Rates(requests=2, tokens=100, clock=Clock())
    rates.take("a", tokens=60)
    with pytest.raises(RateLimited, match="tokens"):
        rates.take("a", tokens=60)
    rates.take("a", tokens=40)


def test_more_than_a_minutes_worth_waits_for_a_full_bucket_and_is_paid_for():
    clock = Clock()
    rates = Rates(requests=None, tokens=100, clock=clock)
    rates.take("a", tokens=250)
    clock.now += 89
    with pytest.raises(RateLimited) as caught:
        rates.take("a", tokens=1)
    assert caught.value.extra["retry_after"] == 2
    clock.now += 2
    rates.take("a", tokens=1)


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/completions"])
def test_refused_with_the_time_to_come_back(model, path):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6}
    with running_api(new_memory_store(), model, tenant_requests_per_minute=1, tenant_tokens_per_minute=1000) as api:
        first = api.client.post("/v1/jobs", json=body)
        assert first.status_code == 202
        assert first.headers["x-ratelimit-limit-requests"] == "1"
        assert first.headers["x-ratelimit-remaining-requests"] == "0"
        assert first.headers["x-ratelimit-remaining-tokens"] == "990"
        assert 59 < float(first.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
        refused = api.client.post(path, json=body)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "60")
        told = refused.json()
        assert told.get("error", told)["code"] == "rate_limit_exceeded"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert api.client.get("/v1/jobs").status_code == 200


def test_without_limits_there_are_no_headers(memory_api):
    answer = memory_api.client.post("/v1/jobs", json={"prompt": PROMPT})
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
