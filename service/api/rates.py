"""How fast a tenant may ask: requests and tokens a minute, counted in each api process (as open streams are), forgotten with it.

A bucket holds one minute's worth and fills steadily, so that whoever was silent for a minute may ask for all of it at once.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from service.api.problems import RateLimited

_MINUTE = 60.0


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float


class _Rate:
    def __init__(self, name: str, limit: int, clock: Callable[[], float]) -> None:
        self.name = name
        self.limit = limit
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}  #: by tenant: as many as there are keys for

    def level(self, tenant: str) -> float:
        now = self._clock()
        bucket = self._buckets.setdefault(tenant, _Bucket(self.limit, now))
        bucket.level = min(self.limit, bucket.level + (now - bucket.at) * self.limit / _MINUTE)
        bucket.at = now
        return bucket.level

    def take(self, tenant: str, amount: int) -> None:
        self._buckets[tenant].level -= amount

    def seconds_to(self, tenant: str, level: float) -> float:
        """Until there is so much."""
        return max(0.0, level - self.level(tenant)) * _MINUTE / self.limit

    def headers(self, tenant: str) -> dict[str, str]:
        """As OpenAI names them."""
        return {
            f"x-ratelimit-limit-{self.name}": str(self.limit),
            f"x-ratelimit-remaining-{self.name}": str(max(0, int(self.level(tenant)))),
            f"x-ratelimit-reset-{self.name}": f"{self.seconds_to(tenant, self.limit):.3f}s",
        }


class Rates:
    """Used from the event loop only. None: no limit."""

    def __init__(self, requests: int | None, tokens: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        limits = {"requests": requests, "tokens": tokens}
        self._rates = {name: _Rate(name, limit, clock) for name, limit in limits.items() if limit is not None}

    def take(self, tenant: str, tokens: int) -> None:
        """One request, and the tokens of its prompts and longest answers. Raises RateLimited and takes nothing."""
        for rate, amount in self._asked(tokens):
            # More than a minute's worth can never be there at once: it takes a full bucket, and leaves it in debt.
            needed = min(amount, rate.limit)
            wait = rate.seconds_to(tenant, needed)
            if wait > 0:
                setting = f"--tenant-{rate.name}-per-minute"
                raise RateLimited(
                    f"{amount} {rate.name} are more than your rate of {rate.limit} a minute allows just now ({setting}): "
                    f"try again in {math.ceil(wait)} s",
                    retry_after=math.ceil(wait),
                )
        for rate, amount in self._asked(tokens):
            rate.take(tenant, amount)

    def _asked(self, tokens: int) -> list[tuple[_Rate, int]]:
        amounts = {"requests": 1, "tokens": tokens}
        return [(rate, amounts[name]) for name, rate in self._rates.items()]

    def headers(self, tenant: str) -> dict[str, str]:
        return {name: value for rate in self._rates.values() for name, value in rate.headers(tenant).items()}
