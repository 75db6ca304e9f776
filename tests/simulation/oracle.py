"""What must hold, whatever goes wrong. It sees Redis, the pool files and the device pages, and knows every job's reference."""

from contextlib import contextmanager

import xxhash

from recovery.plan import Action
from recovery.sequences import verify_log
from storage.records import JobStatus, LogRead
from tests.simulation.hash_model import PAGE_BYTES, Kind, Reference


class Violation(AssertionError):
    """A promise was broken."""


class Oracle:
    def __init__(self, world) -> None:
        self._world = world
        self._kinds: dict[str, Kind] = {}
        self._references: dict[str, Reference] = {}
        self._pages: dict[str, bytes] = {}  #: identity -> what a page of that name holds
        self._records: dict[str, object] = {}  #: as they were seen last
        self._seen: dict[str, int] = {}  #: tokens that a client saw
        self._commit = -1
        self.cancelled: set[str] = set()

    def know(self, job_id: str, kind: Kind, reference: Reference) -> None:
        self._kinds[job_id], self._references[job_id] = kind, reference
        self._pages |= reference.pages

    # --- after every event --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """A client reads whatever is there, at once."""
        store = self._world.redis.store
        commit = store.identity().commit
        if commit != self._commit:
            self._commit = commit
            known = list(self._references)
            slices = self._world.judge.read([LogRead(job_id) for job_id in known])
            for job_id, piece in zip(known, slices, strict=True):
                if piece is None:
                    require(job_id not in self._records, f"{job_id}: an accepted job is gone")
                else:
                    self._check_job(job_id, piece)

    def _check_job(self, job_id, piece) -> None:
        record, seen, wanted = piece.record, self._seen.get(job_id, 0), self._references[job_id].tokens
        length = len(piece.entries)
        before = self._records.get(job_id)
        require(length == record.log_length, f"{job_id}: {length} tokens in the log, {record.log_length} in the record")
        require(length >= seen, f"{job_id}: a client saw {seen} tokens, {length} are left")
        tokens = tuple(entry.token for entry in piece.entries[seen:])
        require(tokens == wanted[seen:length], f"{job_id}: tokens {tokens} from {seen} on, the reference has {wanted[seen:]}")
        if before is not None:
            require(not before.status.terminal or record == before, f"{job_id} changed after its end: {before} {record}")
            require(record.fence >= before.fence, f"{job_id}: fence {record.fence} after {before.fence}")
        if record.status.terminal and (before is None or not before.status.terminal):
            self._check_end(job_id, record, piece.entries)
        self._records[job_id], self._seen[job_id] = record, length

    def _check_end(self, job_id, record, entries) -> None:
        wanted, kind = self._references[job_id], self._kinds[job_id]
        verify_log(record, (entry.token for entry in entries))
        if record.status is JobStatus.CANCELLED:
            require(job_id in self.cancelled, f"{job_id} was cancelled by nobody")
            return
        complete = wanted.finish_reason == "stop" or kind.ignore_eos
        status = JobStatus.COMPLETED if complete else JobStatus.INCOMPLETE
        require(record.status is status, f"{job_id} ended as {record.status}, {record.error}; the reference as {status}")
        require(len(entries) == len(wanted.tokens), f"{job_id} ended after {len(entries)} tokens of {len(wanted.tokens)}")
        require(record.finish_reason == wanted.finish_reason, f"{job_id}: {record.finish_reason}, not {wanted.finish_reason}")
        text = "".join(entry.text for entry in entries)
        require(text == wanted.text, f"{job_id}: text {text!r}, the reference has {wanted.text!r}")

    @property
    def all_ended(self) -> bool:
        return all(job_id in self._records and self._records[job_id].status.terminal for job_id in self._references)

    def unfinished(self) -> list[str]:
        return [f"{job_id}: {getattr(self._records.get(job_id), 'status', 'never accepted')}" for job_id in self._references]

    def forgive(self) -> None:
        """Redis came back without its tail, under weak durability: what clients saw of it may be gone, nothing else."""
        self._records.clear()
        self._seen.clear()
        self._commit = -1

    # --- writes -------------------------------------------------------------------------------------------------------

    @contextmanager
    def owners_commit(self, name, args):
        """A commit is accepted from the owner alone: the incarnation that the job was given to last, with its fence."""
        if name != "write_step":
            yield
            return
        _, incarnation, _, writes = args
        owners = self._owners(writes)
        yield
        for commit, owner, after in zip(writes.commits, owners, self._owners(writes), strict=True):
            if owner is not None and after is not None and owner.log_length != after.log_length:
                require(
                    (owner.incarnation, owner.fence) == (incarnation, commit.fence),
                    f"{commit.job_id}: a commit was accepted with fence {commit.fence}, the owner's is {owner.fence}",
                )

    def _owners(self, writes):
        slices = self._world.judge.read([LogRead(commit.job_id, limit=0) for commit in writes.commits])
        return [None if piece is None else piece.record for piece in slices]

    def published(self, name, args) -> None:
        """An entry names bytes that are complete, and they are those of its identity."""
        if name != "write_step" or not args[3].publish:
            return
        engine_id, incarnation, pool_id, writes = args
        host = self._world.hosts[engine_id]
        if host.incarnation != incarnation:  # the last words of an earlier life; the disk may have lost since what they speak of
            return
        table = self._world.judge.pool_table(pool_id)
        for page, entry in writes.publish.items():
            if table.get(page) == entry:
                self._check_entry(host, page, entry, may_be_damaged=host.entries_doubtful)

    def may_write(self, host, page) -> None:
        """A page is written only while no entry names it."""
        if host.entries_doubtful or self._world.counts["redis lost its tail"]:
            return
        entry = self._world.judge.pool_table(host.pool_id).get(page)
        require(entry is None, f"{host.name}: host page {page} is written, and an entry names it")

    def check_pool(self, host) -> None:
        """Every entry of the pool's table: after a power loss its bytes may be anything, but then their checksum says so."""
        if not host.pool_id or not host.path.exists():
            return
        damaged = host.may_be_damaged or host.entries_doubtful or bool(self._world.counts["redis lost its tail"])
        for page, entry in self._world.judge.pool_table(host.pool_id).items():
            self._check_entry(host, page, entry, may_be_damaged=damaged)

    def _check_entry(self, host, page, entry, *, may_be_damaged) -> None:
        require(entry.identity in self._pages, f"{host.name}: host page {page} is published as a page of no job")
        content = host.read_page(page)
        if xxhash.xxh3_64_intdigest(content) != entry.checksum:
            require(may_be_damaged, f"{host.name}: host page {page} is published, and its bytes are not those it was published for")
            self._world.count("damaged page behind an entry")
            return
        require(content == self._pages[entry.identity], f"{host.name}: host page {page} verifies, and holds another page's bits")

    # --- an engine ----------------------------------------------------------------------------------------------------

    def check_engine(self, life) -> None:
        """Its own books, and the bits of every page that anybody could find on the device."""
        life.engine.check()
        prefix, pages = life.engine.residency.prefix, life.device_bytes
        for identity, content in self._pages.items():
            page = prefix.find(identity)
            if page is not None:
                found = bytes(pages[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
                require(
                    found == content, f"{life.name}: device page {page} is cached under an identity whose bits it does not have"
                )

    def admitted(self, life, held, restored_pages, restart) -> None:
        """What was foretold for this life is kept, or more: pages that were there are not computed again."""
        self._world.count("resumed" if held.resumed and restored_pages else "replayed" if held.resumed else "started")
        stats, foretold = life.engine.residency.stats, life.foretold.pop(held.job_id, None)
        if foretold is None or foretold.action not in (Action.RESUME, Action.REPLAY) or not held.resumed:
            return
        if foretold.committed_tokens != held.record.log_length:  # another engine had it in between
            return
        host = life.engine.residency.host
        if stats.verify_failures or (host is not None and host.num_evictions):
            return
        self._world.count("recovery was as planned")
        require(
            restored_pages >= foretold.pages_restored and restart.replayed <= foretold.tokens_replayed,
            f"{held.job_id}: {restored_pages} pages restored and {restart.replayed} tokens replayed, the plan said "
            f"{foretold.pages_restored} and {foretold.tokens_replayed}",
        )

    def life_ended(self, life) -> None:
        stats = life.engine.residency.stats
        for name in ("stored", "swapped_in", "copies_failed", "verify_failures", "copied_on_write", "unbacked"):
            self._world.count(name.replace("_", " "), getattr(stats, name))
        self.check_pool(life.host)


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)
