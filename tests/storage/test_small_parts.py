"""Chain hash, key names, rules and failpoints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import chain, failpoints, keys
from storage.rules import pages_needed

CODE = "from storage.failpoints import hit\nfor _ in range(5): hit('commit.before_send')\nprint('survived')"


def run_with(points: str, log: Path, testing: str = "1") -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "MIDSENTENCE_FAILPOINTS": points,
        "MIDSENTENCE_TESTING": testing,
        "MIDSENTENCE_FAILPOINT_LOG": str(log),
    }
    return subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)


class TestFailpoints:
    def test_kills_at_the_named_hit_and_says_so_first(self, tmp_path: Path):
        log = tmp_path / "log"
        assert run_with("commit.before_send=kill@3; pool.mid_write=stop", log).returncode == -9
        assert log.read_text().split()[:2] == ["commit.before_send", "kill"]

    def test_exit_and_raise(self, tmp_path: Path):
        assert run_with("commit.before_send=exit", tmp_path / "log").returncode == 70
        assert "FailpointError" in run_with("commit.before_send=raise@5", tmp_path / "log").stderr

    def test_a_point_that_is_not_reached_leaves_no_line(self, tmp_path: Path):
        done = run_with("commit.before_send=kill@6", tmp_path / "log")
        assert (done.stdout, (tmp_path / "log").exists()) == ("survived\n", False)

    def test_errors_of_a_disk(self, tmp_path: Path):
        assert "[Errno 5]" in run_with("commit.before_send=eio", tmp_path / "log").stderr
        assert "[Errno 28]" in run_with("commit.before_send=partial", tmp_path / "log").stderr

    def test_abort(self, tmp_path: Path):
        assert run_with("commit.before_send=abort", tmp_path / "log").returncode == -6

    def test_each_hit_acts_and_is_told_once(self, tmp_path: Path):
        assert run_with("commit.before_send=sleep:0.01@*", tmp_path / "log").stdout == "survived\n"
        assert len((tmp_path / "log").read_text().splitlines()) == 1

    def test_sleep(self, tmp_path: Path):
        assert run_with("commit.before_send=sleep:0.01@2", tmp_path / "log").stdout == "survived\n"

    @pytest.mark.parametrize("testing", ["", "0", "yes"])
    def test_refused_outside_tests(self, tmp_path: Path, testing: str):
        done = run_with("commit.before_send=kill", tmp_path / "log", testing)
        assert "MIDSENTENCE_TESTING" in done.stderr
        assert done.returncode == 1

    @pytest.mark.parametrize("text", ["x", "x=", "x=burn", "x=kill@0x", "x=kill:3", "=", "x=kill@0", "x=sleep:soon", "=kill"])
    def test_what_cannot_be_meant_is_refused(self, text: str):
        with pytest.raises(RuntimeError, match="failpoint"):
            failpoints.parse(text)

    def test_every_listed_point_is_hit_somewhere(self):
        folder = Path(failpoints.__file__).parent
        text = "".join(path.read_text() for path in folder.glob("*.py") if path.name != "failpoints.py")
        assert [name for name in failpoints.FAILPOINTS if f'"{name}"' not in text] == []


class TestChain:
    def test_known_values(self):
        """Pinned: a changed hash makes every stored log look broken."""
        start = chain.start('{"a":1}', (1, 2, 3), "job-1")
        assert start == "20b48fcbc5fd620a311ddd7e356b82ae"
        assert chain.extend_all(start, [5, 6]) == "4959b9b3159ac278541680c3128a5005"
        assert chain.extend(chain.extend(start, 5), 6) == "4959b9b3159ac278541680c3128a5005"

    @given(st.lists(st.integers(0, 2**31), max_size=6), st.lists(st.integers(0, 2**31), max_size=6))
    def test_different_logs_have_different_chains(self, a: list[int], b: list[int]):
        assert (chain.extend_all("00" * 16, a) == chain.extend_all("00" * 16, b)) == (a == b)

    def test_parts_do_not_run_into_each_other(self):
        starts = {chain.start("a", (1,), "b"), chain.start("a1", (), "b"), chain.start("a", (), "1b"), chain.start("", (1,), "ab")}
        assert len(starts) == 4
        assert chain.start("s", (12,), "j") != chain.start("s", (1, 2), "j")


class TestKeys:
    def test_idempotency_keys_of_tenants_do_not_meet(self):
        pairs = [("", "ab"), ("a", "b"), ("ab", ""), ("1:a", "b"), ("", "1:ab"), ("é", ""), ("", "\ud800")]
        assert len({keys.idempotency_digest(*pair) for pair in pairs}) == len(pairs)

    def test_one_hash_tag(self):
        names = [keys.STORE, keys.job("a"), keys.log("a"), keys.queue("m"), keys.engine("e"), keys.owned("e"), keys.pool("p")]
        assert all(name.startswith("midsentence:{store}:") for name in names)
        assert len(set(names)) == len(names)


@given(
    prompt=st.integers(0, 300), length=st.integers(0, 300), rest=st.integers(1, 300), page_size=st.sampled_from([1, 16, 128]),
    context=st.integers(1, 700),
)  # fmt: skip
def test_a_job_never_needs_more_pages_to_start_than_in_all(prompt: int, length: int, rest: int, page_size: int, context: int):
    need, total = pages_needed(prompt=prompt, length=length, max_tokens=length + rest, page_size=page_size, max_context=context)
    assert 1 <= need <= total
    assert total * page_size >= min(prompt + length + rest, context) - 1
