"""Partitions in a network of our own: between an engine, an api or the clients and what they talk to, one direction or both."""

from collections.abc import Iterator

from chaos.faults.base import Fault
from chaos.faults.partitions import WAYS, Partition, PartitionPastLease
from chaos.netns import Link, no_own_network, own_network
from chaos.place import Engine
from chaos.processes import wait_until
from chaos.scenario import Scenario, counts, random_moment
from chaos.stage import Stage

#: Shorter than a lease by more than a beat and the wait for the packet that is sent again.
_SHORT = (0.2, 1.2)


def partitions(stage: Stage, cuts: int) -> None:
    """Two engines, so that jobs go on while one is cut off. Whoever is not cut off must not suffer, and nobody's tokens may."""
    stage.resources.enter_context(own_network())
    cluster = stage.cluster
    second = cluster.another_engine("second")
    links = cluster.put_links(cluster.main.name, second.name, "api")
    cluster.start_redis()
    for engine in (cluster.main, second):
        cluster.start_engine(engine)
    cluster.start_api()
    cluster.wait_ready()
    wait_until(lambda: cluster.ready(f"http://127.0.0.1:{second.port}"), 90.0, "the second engine")
    for engine in (cluster.main, second):
        stage.watch_engine(engine)
    kinds = list(_kinds(stage, links, (cluster.main, second)))
    faults = [kinds[number % len(kinds)] for number in range(cuts)]
    stage.rng.shuffle(faults)
    with stage.traffic(clients=12):
        for fault in faults:
            random_moment(stage)
            stage.inflict(fault)
        stage.wait_progress(200)
    past = sum(isinstance(fault, PartitionPastLease) for fault in faults)
    lost = sum(stage.metrics(engine)["lease_lost_total"] for engine in (cluster.main, second))
    if lost != past:
        stage.violate("I5", f"engines were declared dead {lost:g} times, and {past} times cut off for so long")


def _kinds(stage: Stage, links: dict[str, Link], engines: tuple[Engine, Engine]) -> Iterator[Fault]:
    """Every link, every direction, for shorter and for longer than the lease."""
    cluster, rng = stage.cluster, stage.rng
    lease = float(cluster.options.environment()["MIDSENTENCE_LEASE_SECONDS"])
    clients = Link("clients-api", "127.0.0.1", cluster.port)
    for ways in WAYS:
        for link in (links[rng.choice(engines).name], links["api"], clients):
            yield Partition(link, ways, rng.uniform(*_SHORT))
        for link in (links["api"], clients):
            yield Partition(link, ways, lease + rng.uniform(1.0, 3.0))
        engine = rng.choice(engines)
        yield PartitionPastLease(links[engine.name], ways, engine)


SCENARIOS = (
    Scenario(
        "partitions",
        partitions,
        runs=counts(1, 2, 4),
        faults=counts(3, 18, 36),
        covers="S18",
        meaning="packets of one direction or both vanish between engine, api or clients and what they talk to, and nobody is told",
        device_pages=80,
        cannot_run=no_own_network,
    ),
)
