"""Known mistakes, put back: each is an edit of the product's sources, run from a copy of them, and must be found.

A suite that finds nothing proves something only if it would have found something. The product carries no switch for this: the copy
is made, edited and thrown away. An edit whose text is not there exactly once is an error, so the list cannot rot.
"""

import contextlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos.place import ROOT

_PACKAGES = ("engine", "recovery", "service", "storage", "tests", "chaos")


@dataclass(frozen=True, slots=True)
class Edit:
    path: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class InScenario:
    """A scenario of this suite, with so many ``faults``; ``settings`` go with the mistake."""

    name: str
    faults: int
    settings: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class InModule:
    """``python -m name arguments``, for what no run from outside reaches in minutes: it says ``Violation: WORDS`` for each."""

    name: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(("python -m", self.name, *self.arguments))


@dataclass(frozen=True, slots=True)
class Mistake:
    """Found when ``where`` sees a promise broken in the way of ``sign``, a pattern: whatever else goes wrong there is no find."""

    name: str
    edits: tuple[Edit, ...]
    where: InScenario | InModule
    sign: str

    def own(self, signs: Sequence[str]) -> list[str]:
        """Those of the things that were seen that give this mistake away."""
        return [sign for sign in signs if re.search(self.sign, sign)]


class Stale(Exception):
    """The text of an edit is not in the sources exactly once."""


def check(mistake: Mistake, root: Path = ROOT) -> None:
    """Raises Stale."""
    for edit in mistake.edits:
        if (found := (root / edit.path).read_text().count(edit.old)) != 1:
            raise Stale(f"{mistake.name}: {edit.path} has {edit.old!r} {found} times")


def copy_sources(place: Path) -> Path:
    """A copy of the product's sources, to put mistakes into."""
    for package in _PACKAGES:
        shutil.copytree(ROOT / package, place / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "pyproject.toml", place / "pyproject.toml")
    return place


@contextlib.contextmanager
def put_back(mistake: Mistake, copy: Path) -> Iterator[None]:
    """The mistake is in ``copy`` meanwhile. Raises Stale."""
    check(mistake, copy)
    before = {edit.path: (copy / edit.path).read_text() for edit in mistake.edits}
    try:
        for edit in mistake.edits:
            path = copy / edit.path
            path.write_text(path.read_text().replace(edit.old, edit.new))
        yield
    finally:
        for name, text in before.items():
            (copy / name).write_text(text)


#: Of the model's small worlds, explored with the edited scripts on a real server.
_NOT_THE_OWNER = r"a commit of life-\d was accepted, the owner is life-\d"
_ALIVE = "if not alive(engine, incarnation) then return answer('DEAD') end\n"

MISTAKES = (
    Mistake(
        "no fence",
        (
            Edit("storage/lua/commit.lua", _ALIVE, ""),
            Edit("storage/lua/commit.lua", "local mine = job[2] == fence and job[3] == incarnation", "local mine = true"),
        ),
        InModule("tests.model", ("fence",)),
        _NOT_THE_OWNER,
    ),
    Mistake(
        "fence without incarnation",
        (Edit("storage/lua/commit.lua", "local mine = job[2] == fence and job[3] == incarnation", "local mine = job[2] == fence"),),
        InModule("tests.model", ("incarnation",)),
        _NOT_THE_OWNER,
    ),
    Mistake(
        "no expected length",
        (
            Edit(
                "storage/lua/commit.lua",
                "if status == '' and reached and (n > 0 or job[6] == counted) then return answer('ALREADY') end\n"
                "if length ~= expected or (n == 0 and job[5] ~= chain) then return answer('GAP') end\n",
                "",
            ),
            Edit("storage/lua/commit.lua", "string.format('%.0f-0', expected + i + 1)", "string.format('%.0f-0', length + i + 1)"),
            Edit("storage/lua/commit.lua", "set(id, 'length', expected + n,", "set(id, 'length', length + n,"),
        ),
        InScenario("bad_networks", 4),
        "^I3 .*other tokens than its reference",
    ),
    Mistake(
        "claim without the held list",
        (Edit("storage/lua/claim.lua", "if not held[id] and #given < limit then", "if false then"),),
        InModule("tests.model", ("held list",)),
        "not at an end",
    ),
    Mistake(
        "claim without the incarnation check",
        (Edit("storage/lua/claim.lua", _ALIVE, ""),),
        InModule("tests.model", ("incarnation of a claim",)),
        "not at an end",
    ),
    Mistake(
        "copy without pin",
        (
            Edit(
                "engine/copies.py",
                "        self._device.share([device_page], COPY)\n        self._stores[host_page.page]",
                "        self._stores[host_page.page]",
            ),
            Edit("engine/copies.py", "            self._device.free([move.device_page], owner=COPY)\n", ""),
            Edit("engine/copies.py", "if pinned != copied:", "if False:"),
        ),
        InModule("tests.simulation", ("--seeds", "300")),
        "verifies, and holds another page's bits",
    ),
    Mistake(
        "entry before copy completes",
        (
            Edit(
                "engine/copies.py",
                "        self._outbox.append(self._pin_out(device_page, host_page))\n",
                "        self._outbox.append(self._pin_out(device_page, host_page))\n"
                "        import xxhash\n\n"
                "        content = self._swap._mover._device_bytes[device_page]\n"
                "        host_page.checksum = xxhash.xxh3_64_intdigest(content.tobytes())\n"
                "        self.host.ready.append(host_page)\n",
            ),
        ),
        InScenario("slow_disk", 3),
        "^I11 .*its bytes do not have the checksum of its entry",
    ),
    Mistake(
        "call shape left out of identity",
        (Edit("engine/identity.py", "(tokens[row], _call_rows(row, num_prompt, prefill_chunk))", "(tokens[row], GENERATED)"),),
        InModule("tests.simulation", ("--seeds", "300")),
        "is cached under an identity whose bits it does not have",
    ),
    Mistake(
        "publish before commit",
        (
            Edit("service/redis_server.py", '"appendfsync": "always",', '"appendfsync": "everysec",'),
            Edit("service/redis_checks.py", '"appendfsync": "always",', '"appendfsync": "everysec",'),
        ),
        InScenario("power_losses", 3, {"allow_weak_durability": "true"}),
        # Now and then the middle of the log is missing, too, and Redis itself refuses what is left of it.
        "^I4 .*were shown before the power loss|Bad file format reading the append only file",
    ),
    Mistake(
        "no checksum",
        (Edit("engine/swap.py", 'problem or ("" if got == move.checksum else "checksum differs")', "problem"),),
        InScenario("page_swaps", 3),
        "were refused by checksum|other tokens than its reference",
    ),
    Mistake(
        "TTL as death",
        (
            Edit(
                "storage/lua/renew.lua",
                "redis.call('HINCRBY', KEY.engine .. ARGV[3], 'beat', 1)",
                "redis.call('HINCRBY', KEY.engine .. ARGV[3], 'beat', 1); redis.call('PEXPIRE', KEY.engine .. ARGV[3], 4000)",
            ),
        ),
        InScenario("redis_pauses", 2),
        "^I5 .*declared dead",
    ),
    Mistake(
        "strike never reset",
        (Edit("storage/lua/commit.lua", "then set(id, 'strikes', 0, 'charged', 0) end", "then set(id, 'charged', 0) end"),),
        InScenario("poison_abort", 1),
        "^I8 .*a healthy job failed",
    ),
    Mistake(
        "take over forgets the strike",
        (Edit("storage/lua/take_over.lua", "orphan(ids[i], suspected[ids[i]])", "orphan(ids[i])"),),
        InScenario("poison_slow_starts", 1),
        r"did not fire: poison job: .* after ([4-9]|\d\d) crashes",
    ),
    Mistake(
        "cancel as a flag",
        (Edit("storage/lua/cancel.lua", "end_job(id, CANCELLED, '', '', '')", "set(id, 'cancel_asked', 1)"),),
        InScenario("api_failpoint_kills", 3),
        "^I10 .*cancel was answered",
    ),
    Mistake(
        "idempotency key not atomic",
        (
            Edit(
                "storage/lua/submit.lua",
                "if digest ~= '' then redis.call('SET', KEY.idempotency .. digest, table.concat(ids, ' ')) end\n",
                "",
            ),
            Edit(
                "storage/redis_store.py",
                '        hit("submit.after_reply")\n',
                '        if digest and word == "CREATED":\n'
                '            self._session.call("SET", keys.IDEMPOTENCY + digest, " ".join(job_ids))\n',
            ),
        ),
        InScenario("one_key", 2),
        "^I8 .*(one Idempotency-Key made|no client was told of)",
    ),
    Mistake(
        "no lock on the pool and its directory",
        (
            Edit("storage/pool_make.py", "except BlockingIOError:\n        return False", "except BlockingIOError:\n        pass"),
            Edit(
                "service/processes.py",
                "except BlockingIOError:\n            os.close(fd)\n            return False",
                "except BlockingIOError:\n            pass",
            ),
        ),
        InScenario("second_starts", 1),
        "did not fire: second start",
    ),
    Mistake(
        "second Redis started because the lock does not live as long as the first",
        (Edit("service/redis_server.py", "pass_fds=(self._lock.fd,),", "pass_fds=(),"),),
        InScenario("supervisor_kills", 3),
        "^I1 .*a second Redis was started",
    ),
    Mistake(
        "msync error ignored",
        (Edit("storage/pool_file.py", "self.poisoned = True\n                raise", "pass"),),
        InScenario("power_losses_bad_disk", 4),
        "^G4 .*pages were lost that had reached the disk",
    ),
    Mistake(
        "model fingerprint ignored",
        (Edit("engine/model_source.py", "add(weights.name, bytes.fromhex(_hash_file(weights)))", 'add(weights.name, b"")'),),
        InScenario("other_models", 1),
        "^G6 .*of another model's jobs were computed",
    ),
    Mistake(
        "resume cursor inclusive",
        (Edit("service/api/streams.py", "self._after = after\n", "self._after = max(0, after - 1)\n"),),
        InScenario("api_kills", 4),
        "^I2 ",
    ),
    Mistake(
        "GONE on an empty store",
        (
            Edit(
                "storage/session.py",
                "        if found is None or (found.store_id, found.epoch)",
                "        if found is None:\n            return\n        if (found.store_id, found.epoch)",
            ),
        ),
        InScenario("redis_emptied", 1),
        "did not fire: an empty Redis",
    ),
    Mistake(
        "unread bytes wait for ever",
        (Edit("service/listening.py", "socket.TCP_USER_TIMEOUT, int(UNREAD_SECONDS * 1000)", "socket.TCP_USER_TIMEOUT, 0"),),
        InScenario("crowds", 1),
        "^I12 .*still holds connections",
    ),
    Mistake(
        "bodies are waited for without end",
        (
            Edit(
                "service/api/protocol.py",
                "self._in_head, self._body_bytes = False, 0\n        self._expect_within(BODY_SECONDS)",
                "self._in_head, self._body_bytes = False, 0\n        self._expect_nothing()",
            ),
        ),
        InScenario("crowds", 3),
        "^I12 .*still holds connections",
    ),
)
