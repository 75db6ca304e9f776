import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine import model_source
from engine.errors import ModelFilesInvalid, ModelNotFound
from engine.geometry import PageGeometry
from engine.model_source import fingerprint, resolve


@pytest.fixture
def folder(tiny_folder, tmp_path):
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_local_folder_is_itself(folder):
    assert resolve(str(folder)) == folder


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_folder_without_a_needed_file_is_refused_by_its_name(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(ModelFilesInvalid, match=missing):
        resolve(str(folder))


@pytest.mark.parametrize("pickled", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused(folder, pickled):
    (folder / "model.safetensors").rename(folder / pickled)
    with pytest.raises(ModelFilesInvalid, match="pickled") as refused:
        resolve(str(folder))
    assert "safetensors" in refused.value.hint


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ModelFilesInvalid, match="no "):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "no such model", "", "a/b/c"])
def test_what_cannot_be_a_model_is_not_found_at_once(name):
    with pytest.raises(ModelNotFound) as refused:
        resolve(name)
    assert refused.value.hint


def test_a_hub_model_without_a_network_is_not_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    command = [sys.executable, "-c", "from engine.model_source import resolve; resolve('nobody/nothing')"]
    start = time.monotonic()
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "HF_HOME": str(tmp_path)})
    assert "ModelNotFound" in ran.stderr
    assert "local folder" in ran.stderr
    assert time.monotonic() - start < 20


def test_the_fingerprint_does_not_depend_on_where_the_files_are(tiny_folder, folder):
    edit_json(folder / "config.json", transformers_version="9.9", _name_or_path="/somewhere/else")
    assert fingerprint(folder) == fingerprint(tiny_folder)
    assert len(bytes.fromhex(fingerprint(folder))) == 16


def test_the_fingerprint_changes_with_all_that_may_change_an_answer(folder):
    seen = {fingerprint(folder)}

    def changed():
        before = len(seen)
        seen.add(fingerprint(folder))
        return len(seen) == before + 1

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].view(np.uint32)[0] ^= 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert changed(), "one bit of one weight"
    edit_json(folder / "config.json", rms_norm_eps=1e-4)
    assert changed()
    edit_json(folder / "generation_config.json", eos_token_id=[1, 2])
    assert changed()
    edit_json(folder / "tokenizer_config.json", chat_template="{{ messages }}")
    assert changed()
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert changed()
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"Ġt"', '"Ġz"', 1))
    assert changed()


def test_a_folder_that_fails_half_way_is_never_seen(tmp_path):
    def fail(scratch):
        (scratch / "config.json").write_text("{")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        model_source.build_folder(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []


def test_processes_that_ask_at_once_convert_once(tmp_path):
    """The lock: of four processes one builds, and all return the whole folder."""
    code = """
import os, sys, time
from pathlib import Path
from engine import model_source
def convert(source, folder):
    with open(sys.argv[1] + '/conversions', 'a') as log:
        log.write('x')
    (folder / 'half').write_text('')
    time.sleep(0.3)
    (folder / 'half').rename(folder / 'whole')
model_source._convert_gguf = convert
print(sorted(os.listdir(model_source.resolve(sys.argv[1] + '/tiny.gguf'))))
"""
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(4)]
    assert {process.communicate(timeout=60)[0] for process in running} == {"['whole']\n"}
    assert (tmp_path / "conversions").read_text() == "x"


@pytest.mark.model
def test_the_demo_model_is_whole_and_its_fingerprint_is_quick():
    folder = resolve("demo")
    assert folder == model_source.cache_folder() / model_source.DEMO_MODEL
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert "<|im_start|>" in json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    fingerprint(folder)  # reads 540 MB into the page cache
    start = time.process_time()
    fingerprint(folder)
    assert time.process_time() - start < 1.0


def test_page_geometry_counts_bytes():
    geometry = PageGeometry(num_layers=30, page_size=16, num_kv_heads=3, head_dim=64, dtype="float32")
    assert geometry.page_shape == (30, 2, 16, 3, 64)
    assert geometry.page_bytes == 737280
    assert geometry.token_bytes == 46080
    with pytest.raises(ValueError, match="page_size"):
        PageGeometry(30, 0, 3, 64, "float32")
    with pytest.raises(ValueError, match="float8"):
        PageGeometry(30, 16, 3, 64, "float8")
