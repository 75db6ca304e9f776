"""The right answers: what the same service makes of each case when nothing happens to it, one job at a time."""

import threading
from pathlib import Path
from random import Random

from chaos.client import Client
from chaos.cluster import Cluster, ClusterError
from chaos.history import History
from chaos.place import ClusterOptions
from chaos.workload import Answer, Case, Catalogue, Size, make_catalogue
from storage.records import JobStatus

_PATIENCE = 120.0
_FIRST_START = 600.0  #: it compiles the kernels


def reference(place: Path, options: ClusterOptions, rng: Random, size: Size, count: int) -> Catalogue:
    """Make a catalogue and answer it. Alone in its batch each time, so that every later batch is held against a batch of one."""
    with Cluster(place, options) as cluster:
        cluster.serve(wait=False)
        cluster.wait_ready(_FIRST_START)
        client = Client("reference", cluster.url, History(), rng, threading.Event())
        catalogue = make_catalogue(rng, size, count, lambda cases: [_answer(client, case) for case in cases])
        client.close()
        if code := cluster.stop():
            raise ClusterError(f"the reference run ended with {code}:\n{cluster.log_tail('serve')}")
    return catalogue


def _answer(client: Client, case: Case) -> Answer:
    job_id = client.submit(case, _PATIENCE)
    if job_id is None or not client.follow(job_id, reader="reference", patience=_PATIENCE):
        raise ClusterError(f"no answer to {case.name} without any fault: {case.body}")
    seen = client.get(job_id).seen
    if seen is None or seen.status not in (JobStatus.COMPLETED, JobStatus.INCOMPLETE):
        raise ClusterError(f"{case.name} ended without any fault as {seen}")
    return Answer(seen.status, seen.token_ids, seen.text, seen.finish_reason)
