"""The engine's metrics say what their help texts claim."""

import time

import pytest
from prometheus_client import CollectorRegistry

from recovery.sequences import commit_of, hold
from service.metrics import EngineMetrics
from service.worker.observer import EngineObserver
from storage.job_spec import JobSpec
from storage.records import JobAnswer, JobRecord, JobStatus, OwnedJob, StepAnswers
from tests.rigs import make_rig

WAITED = 30.0


@pytest.fixture
def world(tiny_folder, tiny_model):
    rig = make_rig(tiny_folder, tiny_model, host_pages=64)
    registry = CollectorRegistry()
    observer = EngineObserver(EngineMetrics(registry), rig.engine)
    spec = JobSpec("tiny", 6, 1, temperature=0.0, ignore_eos=True)
    created = time.time() - WAITED
    record = JobRecord(
        "job", spec.to_json(), tuple(range(20, 30)), "model", 6, JobStatus.IN_PROGRESS, 0, created_at=created, started_at=created
    )
    held, request = hold(OwnedJob("job", 1, 1), record, (), "arithmetic")
    rig.add(request)
    return rig, registry, observer, held


def value(registry, name):
    return registry.get_sample_value(f"midsentence_{name}")


def step(rig, observer, held, answer=JobAnswer.OK):
    result = rig.step()
    for admission in result.admissions:
        observer.admitted(held, admission.restored_pages, admission.restart)
    commits = tuple(commit_of(held, output) for output in result.outputs)
    observer.stepped(result, 0.01)
    observer.committed(StepAnswers((answer,) * len(commits), 1), commits, 0.01)


def test_gauges_are_true_when_no_step_follows(world):
    rig, registry, observer, held = world
    step(rig, observer, held)
    assert value(registry, "num_requests_running") == 1
    assert value(registry, "kv_cache_usage_perc") > 0
    rig.engine.abort("job")
    rig.settle()
    assert value(registry, "num_requests_running") == 0
    assert value(registry, "kv_cache_usage_perc") == 0
    assert value(registry, "checkpoint_lag_tokens") == 0


def test_latencies_count_from_the_creation_of_the_job(world):
    rig, registry, observer, held = world
    while rig.engine.has_work:
        step(rig, observer, held)
    assert value(registry, "time_to_first_token_seconds_count") == 1
    assert value(registry, "time_to_first_token_seconds_sum") >= WAITED
    assert value(registry, "e2e_request_latency_seconds_sum") >= WAITED
    assert value(registry, "generation_tokens_total") == 6
    assert value(registry, "inter_token_latency_seconds_count") == 5


def test_only_a_refused_commit_is_a_fenced_write(world):
    rig, registry, observer, held = world
    step(rig, observer, held)
    observer.dropped("job", "not_listed")  # a cancel that the next beat told of
    assert value(registry, "fenced_writes_rejected_total") == 0
    observer.dropped("job", JobAnswer.FENCED)
    assert value(registry, "fenced_writes_rejected_total") == 1
    step(rig, observer, held)  # its last commit is answered after the drop: nothing is kept for it
    assert value(registry, "inter_token_latency_seconds_count") == 0
