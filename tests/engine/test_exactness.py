"""A row's bits depend on its own sequence alone. Every comparison here is ``==``."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from engine import model_source
from engine.errors import InvalidCall
from engine.exactness import arithmetic_fingerprint, self_test
from engine.kernels.activation import GELU, GELU_TANH, SILU, activate_rows
from engine.kernels.integers import GROUP
from engine.kernels.panels import FORMATS, linear_panels, pack_new, unpack
from engine.model import load_model
from engine.pools import DTYPES
from engine.runner import make_runner
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

PAGE_SIZE, CHUNK = 4, 8
#: the fused path and the module path, in every number format of weights and of pages
MODELS = [
    ("llama", "fp32", "float32"),
    ("llama", "bf16", "bfloat16"),
    ("llama", "int8", "float16"),
    ("qwen2", "int8", "float32"),
    ("qwen3", "fp32", "bfloat16"),
    ("gemma", "int8", "bfloat16"),
    ("mixtral", "fp32", "float32"),
    ("gpt2", "bf16", "float16"),
]
RANDOM = np.random.default_rng(3)


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def model(request, tmp_path_factory):
    architecture, weights, kv_dtype = request.param
    folder = make_tiny_model(tmp_path_factory.mktemp("exact") / architecture, architecture)
    return load_model(folder, weights=weights, kv_dtype=kv_dtype, threads=2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return load_model(make_tiny_model(tmp_path_factory.mktemp("exact") / "llama"), threads=2)


def new_runner(model, num_pages):
    # Not zeros: whatever is read without having been written shows up as NaN.
    shape = (num_pages, *model.geometry(PAGE_SIZE).page_shape)
    return make_runner(model, torch.full(shape, torch.nan, dtype=DTYPES[model.kv_dtype]), PAGE_SIZE, CHUNK)


def prefill(runner, tokens, table, store_from=0, first=0):
    logits = None
    for start in range(first, len(tokens), CHUNK):
        logits = runner.run_chunk(tokens[start : start + CHUNK], start, table, store_from, start + CHUNK >= len(tokens))
    return logits


def rows(runner, tokens, positions, tables, sequences):
    positions, sequences = np.asarray(positions, np.int32), np.asarray(sequences, np.int32)
    return runner.run_rows(np.asarray(tokens), positions, tables, sequences, np.arange(len(positions), dtype=np.int32))


def filled(runner, table, length):
    """The KV of a sequence in token order: [length, layers, 2, heads, dim]."""
    return runner.pool[torch.from_numpy(table).long()].permute(0, 3, 1, 2, 4, 5).flatten(0, 1)[:length].clone()


@pytest.mark.parametrize("batch", [3, 8, 17])
def test_a_sequence_alone_and_in_a_batch_has_the_same_logits_and_pages(model, batch):
    steps, pages_each = 3, 8
    prompts = [RANDOM.integers(0, VOCAB_SIZE, 3 + (5 * i) % 19) for i in range(batch)]
    following = RANDOM.integers(0, VOCAB_SIZE, (batch, steps))
    shared = new_runner(model, batch * pages_each)
    tables = np.random.default_rng(0).permutation(batch * pages_each).astype(np.int32).reshape(batch, pages_each)
    alone_logits, alone_pages = [], []
    for prompt, tokens, shared_table in zip(prompts, following, tables, strict=True):
        alone, table = new_runner(model, pages_each), np.arange(pages_each, dtype=np.int32)
        first = prefill(alone, prompt, table)
        assert torch.equal(first, prefill(shared, prompt, shared_table))
        alone_logits.append([rows(alone, [t], [len(prompt) + i], table[None], [0])[0] for i, t in enumerate(tokens)])
        alone_pages.append(filled(alone, table, len(prompt) + steps))
    for step in range(steps):
        together = rows(shared, following[:, step], [len(p) + step for p in prompts], tables, range(batch))
        assert all(torch.equal(together[i], alone_logits[i][step]) for i in range(batch))
    for i, table in enumerate(tables):
        assert torch.equal(filled(shared, table, len(prompts[i]) + steps), alone_pages[i])


def test_replaying_many_rows_in_one_call_is_generating_them_one_by_one(model):
    prompt, generated = RANDOM.integers(0, VOCAB_SIZE, 13), RANDOM.integers(0, VOCAB_SIZE, 21)
    table = np.arange(9, dtype=np.int32)
    once, again = new_runner(model, 9), new_runner(model, 9)
    prefill(once, prompt, table)
    prefill(again, prompt, table)
    positions = np.arange(len(prompt), len(prompt) + len(generated))
    one_by_one = torch.cat([rows(once, [t], [p], table[None], [0]) for t, p in zip(generated, positions, strict=True)])
    replayed = rows(again, generated, positions, table[None], np.zeros(len(generated)))
    assert torch.equal(one_by_one, replayed)
    assert torch.equal(filled(once, table, 34), filled(again, table, 34))


def test_replays_and_new_rows_of_others_mix_in_one_call(model):
    tokens = RANDOM.integers(0, VOCAB_SIZE, (3, 6))
    tables = np.arange(6, dtype=np.int32).reshape(3, 2)
    expected = new_runner(model, 6)
    alone = [torch.cat([rows(expected, [t], [p], tables, [s]) for p, t in enumerate(tokens[s])]) for s in range(3)]
    mixed = new_runner(model, 6)
    rows(mixed, tokens[0, :5], range(5), tables, [0] * 5)
    logits = rows(
        mixed,
        [tokens[0, 5], *tokens[1], *tokens[2, :4]],
        [5, *range(6), *range(4)],
        tables,
        [0] + [1] * 6 + [2] * 4,
    )
    assert torch.equal(logits, torch.cat([alone[0][5:], alone[1], alone[2][:4]]))


def test_pages_may_lie_anywhere(model):
    prompt, generated = RANDOM.integers(0, VOCAB_SIZE, 11), RANDOM.integers(0, VOCAB_SIZE, 4)
    results = []
    for table in (np.array([0, 1, 2, 3]), np.array([9, 2, 7, 0])):
        runner, table = new_runner(model, 10), table.astype(np.int32)
        first = prefill(runner, prompt, table)
        results.append((first, rows(runner, generated, range(11, 15), table[None], [0] * 4), filled(runner, table, 15)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("survived", [1, 2, 3])
def test_a_chunk_recomputed_around_surviving_pages_is_the_same_and_leaves_them_alone(model, survived):
    """The chunk is computed from its first token, even when some of its pages survived (here: pages of 4, chunks of 8)."""
    prompt, table = RANDOM.integers(0, VOCAB_SIZE, 19), np.arange(5, dtype=np.int32)
    whole = new_runner(model, 5)
    expected = prefill(whole, prompt, table)
    restored = new_runner(model, 5)
    restored.pool[:survived] = whole.pool[:survived]
    store_from = survived * PAGE_SIZE
    mark = restored.pool[:survived].clone()
    logits = prefill(restored, prompt, table, store_from, first=store_from // CHUNK * CHUNK)
    assert torch.equal(logits, expected)
    assert torch.equal(restored.pool[:survived], mark)
    assert torch.equal(filled(restored, table, 19), filled(whole, table, 19))


def test_the_fused_path_computes_a_prompt_like_any_other_rows(llama):
    prompt, table = RANDOM.integers(0, VOCAB_SIZE, 70), np.arange(18, dtype=np.int32)
    chunks, row_by_row = new_runner(llama, 18), new_runner(llama, 18)
    logits = prefill(chunks, prompt, table)
    for position, token in enumerate(prompt):
        last = rows(row_by_row, [token], [position], table[None], [0])[0]
    assert torch.equal(logits, last)
    assert torch.equal(filled(chunks, table, 70), filled(row_by_row, table, 70))


def test_rows_below_store_from_are_never_written(llama):
    """A sealed page may be shared: even a write of equal bits would race with its readers."""
    prompt, table = RANDOM.integers(0, VOCAB_SIZE, 8), np.arange(2, dtype=np.int32)
    runner = new_runner(llama, 2)
    runner.pool[0] = 123.0
    runner.run_chunk(prompt, 0, table, 4, False)
    assert bool((runner.pool[0] == 123.0).all())
    assert not bool(runner.pool[1].isnan().any())


def test_two_runners_on_one_model_do_not_meet(llama):
    prompt, table = RANDOM.integers(0, VOCAB_SIZE, 6), np.arange(2, dtype=np.int32)
    one, two = new_runner(llama, 2), new_runner(llama, 2)
    first = prefill(one, prompt, table)
    prefill(two, prompt[::-1].copy(), table)
    a = rows(one, [5], [6], table[None], [0])
    rows(two, [6], [6], table[None], [0])
    assert torch.equal(first, prefill(one, prompt, table))
    assert torch.equal(a, rows(one, [5], [6], table[None], [0]))


def test_another_process_computes_the_same_bits(llama):
    script = (
        "import sys, hashlib, numpy as np, torch\n"
        "from pathlib import Path\n"
        "from tests.engine.test_exactness import digest_of_a_run\n"
        "print(digest_of_a_run(Path(sys.argv[1])))\n"
    )
    command = [sys.executable, "-c", script, str(llama.folder)]
    there = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()
    assert there == digest_of_a_run(llama.folder)


def digest_of_a_run(folder):
    model = load_model(folder, threads=2)
    runner, table = new_runner(model, 6), np.arange(6, dtype=np.int32)
    tokens = np.random.default_rng(11).integers(0, VOCAB_SIZE, 23)
    logits = [prefill(runner, tokens[:13], table)[None], rows(runner, tokens[13:], range(13, 23), table[None], [0] * 10)]
    return hashlib.blake2b(torch.cat(logits).numpy().tobytes() + filled(runner, table, 23).numpy().tobytes()).hexdigest()


def test_the_self_test_passes(model):
    assert self_test(new_runner(model, 2)) == []


def test_the_self_test_names_a_layer_that_is_not_exact(tmp_path):
    model = load_model(make_tiny_model(tmp_path / "model", "gemma"), threads=2)
    mlp = model.module.model.layers[1].mlp
    mlp.up_proj = nn.Linear(mlp.up_proj.in_features, mlp.up_proj.out_features, bias=False)
    problems = self_test(new_runner(model, 2))
    assert any("logits" in problem for problem in problems)
    assert [problem for problem in problems if "layers.1.mlp.up_proj" in problem]
    assert not any("layers.0" in problem or "attention" in problem for problem in problems)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize(("length", "outputs"), [(64, 64), (172, 37), (7, 5), (576, 9), (1, 1)])
def test_the_linear_kernel(length, outputs, weights):
    x, w = (RANDOM.standard_normal(shape, dtype=np.float32) for shape in ((33, length), (outputs, length)))
    bias = RANDOM.standard_normal(outputs, dtype=np.float32)
    panels, scale = pack_new(w, weights, 2)
    kept = unpack(panels, scale, outputs, length)
    alone = np.empty((33, outputs), np.float32)
    for i in range(33):
        linear_panels(x[i : i + 1], panels, scale, bias, alone[i : i + 1], 1)
    read = prepared(x) if weights == "int8" else x.astype(np.float64)
    np.testing.assert_allclose(alone, read @ kept.T + bias, rtol=1e-4, atol=1e-4)
    for count in (2, 3, 4, 5, 6, 7, 8, 9, 17, 33):
        for threads in (1, 2, 3, 8):
            y = np.full((count, outputs), np.nan, np.float32)
            linear_panels(x[:count], panels, scale, bias, y, threads)
            assert np.array_equal(y, alone[:count]), (count, threads)


def prepared(x):
    """What int8 panels multiply: 16-bit integers with a scale for each 128 inputs."""
    levels, result = np.float32(32767), np.empty(x.shape)
    for at in range(0, x.shape[1], GROUP):
        group = x[:, at : at + GROUP]
        largest = np.abs(group).max(axis=1, keepdims=True)
        integers = np.rint(group * (levels / largest).astype(np.float64))
        result[:, at : at + GROUP] = integers * (largest / levels)
    return result


def test_rows_that_integers_cannot_hold():
    w = RANDOM.standard_normal((40, 300), dtype=np.float32)
    x = RANDOM.standard_normal((6, 300), dtype=np.float32)
    x[1, 200], x[2, 7], x[3, 299] = np.nan, np.inf, -np.inf
    x[4] = 0.0
    x[5, :128] *= np.float32(1e30)
    y = np.empty((6, 40), np.float32)
    panels, scale = pack_new(w, "int8", 2)
    linear_panels(x, panels, scale, np.empty(0, np.float32), y, 2)
    assert np.isfinite(y[[0, 4, 5]]).all()
    assert not np.isfinite(y[1:4]).any()
    assert not y[4].any()
    expected = x[5].astype(np.float64) @ unpack(panels, scale, 40, 300).T
    np.testing.assert_allclose(y[5], expected, atol=1e-4 * np.abs(expected).max())


def test_what_panels_keep_of_weights():
    w = RANDOM.standard_normal((37, 50), dtype=np.float32)
    w[3] = 0.0
    assert np.array_equal(unpack(*pack_new(w, "fp32", 2), 37, 50), w)
    nearest = torch.from_numpy(w).bfloat16().float().numpy()
    assert np.array_equal(unpack(*pack_new(w, "bf16", 2), 37, 50), nearest)
    step = np.abs(w).max(axis=1, keepdims=True) / 127
    assert np.all(np.abs(unpack(*pack_new(w, "int8", 2), 37, 50) - w) <= step / 2 * 1.001)


@pytest.mark.parametrize(
    ("kind", "reference"),
    [
        (SILU, nn.functional.silu),
        (GELU, nn.functional.gelu),
        (GELU_TANH, lambda x: nn.functional.gelu(x, approximate="tanh")),
    ],
)
def test_the_activation_kernel(kind, reference):
    x = np.concatenate([np.linspace(-120, 120, 5001), [0.0, -0.0, np.nan, 1e-30]]).astype(np.float32)
    y, single = np.empty_like(x), np.empty(1, np.float32)
    activate_rows(x, y, kind, 2)
    expected = reference(torch.from_numpy(x).double()).numpy()
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=1e-6, equal_nan=True)
    for i in range(0, len(x), 97):
        activate_rows(x[i : i + 1], single, kind, 1)
        assert single.tobytes() == y[i : i + 1].tobytes()


@pytest.mark.parametrize(
    "call",
    [
        lambda r, t: r.run_chunk(np.zeros(0, np.int64), 0, t, 0, False),
        lambda r, t: r.run_chunk(np.zeros(CHUNK + 1, np.int64), 0, t, 0, False),
        lambda r, t: r.run_chunk(np.zeros(4, np.int64), 8, t, 0, False),
        lambda r, t: r.run_chunk(np.array([VOCAB_SIZE]), 0, t, 0, False),
        lambda r, t: r.run_chunk(np.zeros(4, np.int64), 0, np.array([7], np.int32), 0, False),
        lambda r, t: rows(r, [1], [8], t[None], [0]),
        lambda r, t: rows(r, [1], [-1], t[None], [0]),
        lambda r, t: rows(r, [1], [0], t[None], [1]),
        lambda r, t: rows(r, [1], [0], np.array([[-1]], np.int32), [0]),
        lambda r, t: rows(r, [1, 2], [0], t[None], [0]),
    ],
)
def test_calls_that_do_not_fit_are_refused_before_anything_is_written(llama, call):
    runner = new_runner(llama, 2)
    with pytest.raises(InvalidCall):
        call(runner, np.arange(2, dtype=np.int32))
    assert bool(runner.pool.isnan().all())


def test_the_arithmetic_fingerprint_covers_what_changes_bits():
    base = {"threads": 2, "weights": "fp32", "kv_dtype": "float32", "prefill_chunk": 64, "page_size": 16}
    changes = [
        {},
        {"threads": 1},
        {"weights": "int8"},
        {"kv_dtype": "bfloat16"},
        {"prefill_chunk": 65},
        {"page_size": 8},
    ]
    prints = [arithmetic_fingerprint(**(base | change)) for change in changes]
    assert len(set(prints)) == len(changes)
    assert prints[0] == arithmetic_fingerprint(**base)
    assert len(bytes.fromhex(prints[0])) == 16


@pytest.mark.model
@pytest.mark.parametrize(("weights", "kv_dtype"), [("fp32", "float32"), ("bf16", "bfloat16"), ("int8", "float16")])
def test_the_demo_model_is_exact(weights, kv_dtype):
    model = load_model(model_source.resolve("demo"), weights=weights, kv_dtype=kv_dtype, threads=2)
    assert self_test(new_runner(model, 2)) == []
