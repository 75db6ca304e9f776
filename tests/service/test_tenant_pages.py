"""Pages are shared within a tenant and with nobody else: while an engine runs, and by the one that comes after it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine.identity import page_identities, root_identity
from recovery.observe import observe
from recovery.plan import Action, plan
from tests.lives import life, new_store, submit, wait_until
from tests.rigs import CHUNK, PAGE_SIZE, request

LONG = 4 * CHUNK
PROMPT = request("the-prompt", LONG, max_tokens=40)


def job(job_id):
    return replace(PROMPT, sequence_id=job_id)


def identities(tenant):
    root = root_identity("model", "arithmetic", tenant)
    return set(page_identities(root, PROMPT.prompt_ids, LONG, page_size=PAGE_SIZE, prefill_chunk=CHUNK))


def run(store, job_id, tenant):
    submit(store, [job(job_id)], tenant)
    wait_until(lambda: store.get(job_id).status.terminal)
    return store.get(job_id)


@pytest.fixture
def store():
    return new_store()


def test_a_long_prompt_is_cached_for_its_own_tenant_alone(tiny_folder, tiny_model, store):
    one = life(tiny_folder, tiny_model, store)
    assert run(store, "first", "alice").cached_tokens == 0
    assert run(store, "foreign", "bob").cached_tokens == 0
    assert run(store, "nobodys", "").cached_tokens == 0
    for tenant, job_id in (("alice", "again"), ("bob", "his-own"), ("", "without")):
        assert run(store, job_id, tenant).cached_tokens > LONG // 2
    one.crash()
    published = {entry.identity for entry in store.pool_table("pool-e1").values()}
    assert identities("alice") & published
    assert identities("bob") & published
    assert not identities("alice") & identities("bob")


def test_the_engine_that_comes_after_finds_the_pages_of_each_tenant_and_no_others(tiny_folder, tiny_model, store):
    one = life(tiny_folder, tiny_model, store)
    submit(store, [job("alices")], "alice")
    wait_until(lambda: store.get("alices").log_length > 10)
    one.crash()
    one.rig.engine.residency.close()
    submit(store, [job("bobs")], "bob")

    # As `recover --dry-run` looks: every tenant's jobs, and for each the pages of its own tenant.
    backing = one.rig.backing
    scratch = backing.pages[0].copy()
    pool = SimpleNamespace(
        header=SimpleNamespace(pool_id="pool-e1"),
        page_ok=lambda page, entry: backing.read_pages(page, scratch) == [entry.checksum],
    )
    (engine,) = store.engines()
    foretold = {found.job_id: found for found in plan(observe(store, engine, pool, is_alive=lambda _: False)).jobs}
    assert foretold["alices"].action is Action.RESUME
    assert foretold["alices"].pages_restored >= LONG // PAGE_SIZE
    assert (foretold["bobs"].action, foretold["bobs"].pages_restored) == (Action.START, 0)

    two = life(tiny_folder, tiny_model, store, one)
    wait_until(lambda: store.get("alices").status.terminal and store.get("bobs").status.terminal)
    two.crash()
    restored = {job_id: pages for job_id, pages, _ in two.observer.admissions}
    assert restored["alices"] == foretold["alices"].pages_restored
    assert restored["bobs"] == 0
    assert store.get("bobs").cached_tokens == 0
