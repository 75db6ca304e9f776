"""Bad networks between the service and Redis, by way of the proxy."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from chaos.cluster import Cluster
from chaos.faults.base import Proof
from chaos.processes import wait_until
from chaos.proxy import Crumbs, Cut, Delay, Proxy, Rule, Silence

_FIRE_TIMEOUT = 30.0
#: Of requests and replies alike: most are shorter than a few hundred bytes, and the ends of all of them are tried as well.
_LONGEST_CUT = 400


@dataclass(frozen=True, slots=True)
class BadNetwork:
    """``rule`` holds for some seconds from its first effect on."""

    name: str
    proxy: Proxy
    rule: Rule
    seconds: float = 0.0

    def apply(self, cluster: Cluster) -> Proof:
        self.proxy.rule = self.rule
        try:
            wait_until(lambda: self.rule.fired, _FIRE_TIMEOUT, self.name)
            time.sleep(self.seconds)
        finally:
            self.proxy.rule = None
        return Proof(True, f"for {self.seconds:g} s")


def cut_request(proxy: Proxy, rng: Random) -> BadNetwork:
    after = rng.randrange(_LONGEST_CUT)
    return BadNetwork(f"request cut after {after} bytes", proxy, Cut(request=True, after=after))


def lost_reply(proxy: Proxy, rng: Random) -> BadNetwork:
    """The whole request arrives, and its reply is lost from some byte on: the outcome is unknown."""
    after = rng.choice([0, 0, rng.randrange(_LONGEST_CUT)])
    return BadNetwork(f"reply cut after {after} bytes", proxy, Cut(request=False, after=after))


def slow(proxy: Proxy, rng: Random) -> BadNetwork:
    seconds = rng.choice([0.05, 0.2, 0.5])
    return BadNetwork(f"every read waits {seconds:g} s", proxy, Delay(seconds), 3.0)


def crumbs(proxy: Proxy, rng: Random) -> BadNetwork:
    return BadNetwork("byte by byte", proxy, Crumbs(), 2.0)


def silence(proxy: Proxy, rng: Random) -> BadNetwork:
    """Longer than a client's own time-out, sometimes."""
    request, seconds = rng.random() < 0.5, rng.choice([1.0, 7.0])
    return BadNetwork(f"no {'requests' if request else 'replies'} arrive", proxy, Silence(request=request), seconds)


BAD_NETWORKS: tuple[Callable[[Proxy, Random], BadNetwork], ...] = (
    cut_request,
    lost_reply,
    cut_request,
    lost_reply,
    slow,
    crumbs,
    silence,
)
