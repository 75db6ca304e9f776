"""The product without one of its mechanisms: what the simulator must find."""

from dataclasses import replace
from types import SimpleNamespace

import xxhash

from engine.cache import PagedKVCache
from engine.copies import Copies, _Store
from engine.eviction import make_policy
from engine.host_cache import HostCache
from engine.residency import Residency
from engine.swap import Mover, PageMove
from storage import chain
from storage.memory_store import MemoryJobStore
from storage.pool_file import PoolFile
from storage.records import JobStatus, StepAnswers, StepWrites
from tests.simulation.network import Connection
from tests.simulation.product import Product


def rebased(commit, record):
    """The commit as one that fits, whatever the log holds by now."""
    return replace(
        commit,
        expected=record.log_length,
        chain=chain.extend_all(record.chain, [entry.token for entry in commit.tokens]),
    )


class EachCommitAlone(MemoryJobStore):
    def write_step(self, engine_id, incarnation, pool_id, writes):
        answers = []
        for commit in writes.commits:
            record = self.get(commit.job_id)
            if record is None or record.status is not JobStatus.IN_PROGRESS:
                answers += super().write_step(engine_id, incarnation, pool_id, StepWrites((commit,))).commits
            else:
                answers.append(self.commit(record, engine_id, incarnation, pool_id, commit))
        pages = super().write_step(engine_id, incarnation, pool_id, replace(writes, commits=()))
        return StepAnswers(tuple(answers), pages.commit)


class NoFence(EachCommitAlone):
    def commit(self, record, engine_id, incarnation, pool_id, commit):
        as_owner = StepWrites((replace(commit, fence=record.fence),))
        (answer,) = super(EachCommitAlone, self).write_step(record.engine_id, record.incarnation, pool_id, as_owner).commits
        return answer


class NoExpectedLength(EachCommitAlone):
    def commit(self, record, engine_id, incarnation, pool_id, commit):
        appended = StepWrites((rebased(commit, record),))
        (answer,) = super(EachCommitAlone, self).write_step(engine_id, incarnation, pool_id, appended).commits
        return answer


class NoHeldList(MemoryJobStore):
    def claim(self, engine_id, incarnation, *, held, free_pages, limit):
        every = [record.job_id for record in self.jobs(tenant=None).jobs]
        return super().claim(engine_id, incarnation, held=every, free_pages=free_pages, limit=limit)


class RetriedAsAnother(Connection):
    """What was not answered is made anew from what the log holds by now."""

    _unanswered = None

    def _call(self, name, *args, **kwargs):
        if name != "write_step":
            return super()._call(name, *args, **kwargs)
        *who, writes = args
        again, self._unanswered = self._unanswered is writes, writes
        if again:
            records = [self._redis.execute(self._identity, "get", (commit.job_id,), {}) for commit in writes.commits]
            anew = tuple(c if r is None else rebased(c, r) for c, r in zip(writes.commits, records, strict=True))
            return super()._call(name, *who, replace(writes, commits=anew))
        return super()._call(name, *who, writes)


class NoChecksumOnRead(Mover):
    def move(self, transfer):
        done = super().move(transfer)
        return replace(done, problems=tuple("" if problem == "checksum differs" else problem for problem in done.problems))


class SyncFailureIgnored(PoolFile):
    def sync(self, pages):
        try:
            super().sync(pages)
        except OSError:
            self.poisoned = False


class ReusedBeforeTheAnswer(HostCache):
    """A page is free as soon as its entry is to be dropped."""

    def _give_up(self, host_page):
        super()._give_up(host_page)
        self.dropped(host_page.page)


class NoPin(Copies):
    """A copy does not hold its device page."""

    def _pin_out(self, device_page, host_page):
        self._stores[host_page.page] = _Store(device_page, host_page)
        return PageMove(device_page, host_page.page)

    def _complete_out(self, done, stats):
        device, self._device = self._device, SimpleNamespace(free=lambda pages, owner: None)
        super()._complete_out(done, stats)
        self._device = device

    def problems(self):
        return self.host.problems()


class EntryBeforeItsCopy(Copies):
    """The entry goes out with the next pipeline, while the bytes are still on their way."""

    def checkpoint(self, identity, device_page, holder, stats):
        before = self.host.find(identity)
        super().checkpoint(identity, device_page, holder, stats)
        host_page = self.host.find(identity)
        if before is None and host_page is not None:
            content = self._swap.device_bytes[device_page]
            host_page.checksum = xxhash.xxh3_64_intdigest(content.tobytes())
            self.host.ready.append(host_page)


class NoCopyOnWrite(Residency):
    def _shared_tail(self, sequence):
        return []


def assembled(host_cache=HostCache, copies=Copies, residency=Residency):
    """``engine.assembly.make_residency`` with other parts."""

    def make(device, host, *, prefill_chunk, eviction, durable, reserve, hooks, swap):
        between = None
        if host is not None:
            policy = make_policy(eviction, host.manager.total_pages)
            cached = host_cache(host.manager, policy, durable=durable, reserve=reserve)
            mover = swap(device, host, on_completed=hooks.on_copied)
            between = copies(device.manager, cached, host, mover, on_problem=hooks.on_problem)
        policy = make_policy(eviction, device.manager.total_pages)
        return residency(PagedKVCache(device, host), policy, prefill_chunk=prefill_chunk, copies=between)

    return make


WITHOUT = {
    "fence": Product(store=NoFence),
    "expected length": Product(store=NoExpectedLength),
    "the held list of a claim": Product(store=NoHeldList),
    "the same call again": Product(connection=RetriedAsAnother),
    "checksum on read": Product(mover=NoChecksumOnRead),
    "poison after a failed sync": Product(pool_file=SyncFailureIgnored),
    "the answer to a drop": Product(residency=assembled(host_cache=ReusedBeforeTheAnswer)),
    "pin of a copy": Product(residency=assembled(copies=NoPin)),
    "copy before its entry": Product(residency=assembled(copies=EntryBeforeItsCopy)),
    "copy on write": Product(residency=assembled(residency=NoCopyOnWrite)),
}
