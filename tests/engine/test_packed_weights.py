"""Packed weights: whole and proved, or made again."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from engine import model_source, packed_weights
from engine.model import load_model
from engine.runner import make_runner
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

TOKENS = np.random.default_rng(5).integers(0, VOCAB_SIZE, 20)


@pytest.fixture
def folder(tmp_path):
    return make_tiny_model(tmp_path / "model", "qwen3")


def logits_of(model):
    runner = make_runner(model, torch.zeros(5, *model.geometry(4).page_shape), 4, 20)
    return runner.run_chunk(TOKENS, 0, np.arange(5, dtype=np.int32), 0, True)


@pytest.mark.timeout(600)  # it compiles kernels
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_mapped_weights_give_the_same_bits(tmp_path, architecture, weights):
    folder = make_tiny_model(tmp_path / "model", architecture, tie_word_embeddings=architecture == "qwen2")
    plain = load_model(folder, weights=weights, threads=2)
    made = load_model(folder, weights=weights, threads=2, packed=tmp_path / "packed" / "a-b-c")
    again = load_model(folder, weights=weights, threads=2, packed=tmp_path / "packed" / "a-b-c")
    assert torch.equal(logits_of(plain), logits_of(made))
    assert torch.equal(logits_of(plain), logits_of(again))
    facts = ("architecture", "num_layers", "num_kv_heads", "head_dim", "vocab_size", "max_context", "eos_token_ids", "weights")
    assert [getattr(plain, fact) for fact in facts] == [getattr(again, fact) for fact in facts]


def test_a_later_start_needs_no_transformers(folder, tmp_path):
    packed = tmp_path / "packed" / "a-b-c"
    load_model(folder, threads=2, packed=packed)
    script = (
        "import sys; from pathlib import Path; from engine.model import load_model; from engine import runner, exactness, core\n"
        "model = load_model(Path(sys.argv[1]), threads=2, packed=Path(sys.argv[2]))\n"
        "import torch; runner = runner.make_runner(model, torch.zeros(2, *model.geometry(4).page_shape), 4, 8)\n"
        "assert exactness.self_test(runner) == []\n"
        "sys.exit(any(name.partition('.')[0] == 'transformers' for name in sys.modules))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(folder), str(packed)], check=True, timeout=120)


@pytest.mark.parametrize("damage", ["flip", "cut", "lost", "manifest"])
def test_what_is_damaged_is_made_again(folder, tmp_path, damage):
    packed = tmp_path / "packed" / "a-b-c"
    expected = logits_of(load_model(folder, threads=2, packed=packed))
    victim = packed / ("manifest.json" if damage == "manifest" else "down.npy")
    content = bytearray(victim.read_bytes())
    if damage == "lost":
        victim.unlink()
    elif damage == "flip":
        content[-100] ^= 1
        victim.write_bytes(content)
    else:
        victim.write_bytes(content[: len(content) // 2])
    assert packed_weights.load(packed) is None
    assert torch.equal(logits_of(load_model(folder, threads=2, packed=packed)), expected)
    assert packed_weights.load(packed) is not None


def test_the_name_says_what_the_contents_depend_on_and_the_unused_goes(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fingerprint = model_source.fingerprint(folder)
    packed = packed_weights.folder_for(fingerprint, "fp32")
    assert packed != packed_weights.folder_for(fingerprint, "int8")
    assert packed == packed_weights.folder_for(fingerprint, "fp32")
    outdated = packed.with_name(f"{fingerprint}-fp32-0123456789abcdef")
    other = packed.with_name(f"{fingerprint}-int8-0123456789abcdef")
    outdated.mkdir(parents=True)
    other.mkdir()
    in_use = packed.with_name(f"{fingerprint}-fp32-fedcba9876543210")
    in_use.mkdir()
    (in_use / "manifest.json").touch()
    (outdated / "manifest.json").touch()
    os.utime(outdated / "manifest.json", (0, 0))
    load_model(folder, threads=2, packed=packed)
    kept = sorted(path.name for path in packed.parent.iterdir() if path.is_dir())
    assert kept == sorted([packed.name, other.name, in_use.name])


def test_other_models_are_not_packed(tmp_path):
    folder = make_tiny_model(tmp_path / "model", "gpt2")
    model = load_model(folder, threads=2, packed=tmp_path / "packed" / "a-b-c")
    assert model.llama is None
    assert not (tmp_path / "packed").exists()
