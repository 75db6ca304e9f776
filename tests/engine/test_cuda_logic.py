"""The CUDA runner without CUDA: its calls, buckets, slots and padding, on the CPU in float32.

``varlen_attn`` itself has no CPU form: ``reference_attention`` keeps its contract in plain torch and checks what the kernel demands
of its arguments. ``test_cuda.py`` runs the rest where there is a device.
"""

import dataclasses
import inspect

import numpy as np
import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from engine.attention import NAME, SLOT_ATTRIBUTE
from engine.calls import CallSlot, ObserveCall
from engine.cuda_device import check_device, check_page_size
from engine.cuda_forward import varlen_attention
from engine.cuda_rows import RowBucket, Trial, agreeing, eager
from engine.cuda_runner import CudaRunner
from engine.errors import InvalidCall, UnsupportedModel
from engine.exactness import arithmetic_fingerprint, self_test
from engine.model import load_model
from engine.model_support import refuse_by_config, refuse_by_observation
from engine.module_runner import ModelRunner
from engine.runner import make_runner
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

PAGE_SIZE, CHUNK, BUCKETS = 4, 16, (4, 8, 16)
RANDOM = np.random.default_rng(5)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}  # both float32: other orders of sums


def reference_attention(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa, seqused_k, block_table, num_splits
):
    """What ``varlen_attn`` documents, one sequence after the other; and what FlashAttention-2 checks before it starts."""
    sequences, page_size = len(cu_seq_q) - 1, key.shape[1]
    assert window_size == (-1, 0)
    assert num_splits == 1
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    for lengths, size in ((cu_seq_q, sequences + 1), (cu_seq_k, sequences + 1), (seqused_k, sequences)):
        assert lengths.dtype == torch.int32
        assert lengths.is_contiguous()
        assert lengths.shape == (size,)
    assert block_table.dtype == torch.int32
    assert block_table.stride(-1) == 1
    assert len(block_table) == sequences
    rows = cu_seq_q.diff()
    assert int(rows.min()) >= 1
    assert int(rows.max()) == max_q
    assert int(cu_seq_q[-1]) == len(query)
    assert bool((rows <= seqused_k).all())
    assert int(seqused_k.max()) <= max_k <= block_table.shape[1] * page_size
    output = torch.empty_like(query)
    for i in range(sequences):
        first, last, length = int(cu_seq_q[i]), int(cu_seq_q[i + 1]), int(seqused_k[i])
        pages = block_table[i, : -(-length // page_size)].long()
        keys, values = (part[pages].flatten(0, 1)[:length].transpose(0, 1)[None] for part in (key, value))
        mask = torch.ones(last - first, length, dtype=torch.bool).tril(length - (last - first))
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[first:last].transpose(0, 1)[None], keys, values, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        output[first:last] = attended[0].transpose(0, 1)
    return output


class Watched:
    """Attention that keeps what it was called with; ``change`` may spoil its result."""

    def __init__(self, change=lambda output, rows: output):
        self.calls = []
        self._change = change

    def __call__(self, query, key, value, cu_seq_q, *args, **kwargs):
        self.calls.append({"rows": len(cu_seq_q) - 1, "queries": len(query), **kwargs})
        return self._change(reference_attention(query, key, value, cu_seq_q, *args, **kwargs), len(cu_seq_q) - 1)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request, tmp_path_factory):
    return load_model(make_tiny_model(tmp_path_factory.mktemp("logic") / request.param, request.param), threads=2, fused=False)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return load_model(make_tiny_model(tmp_path_factory.mktemp("logic") / "llama"), threads=2, fused=False)


def pages(model, num_pages):
    # Not zeros: whatever is read without having been written shows up as NaN.
    return torch.full((num_pages, *model.geometry(PAGE_SIZE).page_shape), torch.nan)


def on_device(model, num_pages, *, buckets=BUCKETS, attention=reference_attention):
    return CudaRunner(model, pages(model, num_pages), PAGE_SIZE, CHUNK, buckets=buckets, attention=attention, launcher=eager)


def prefill(runner, tokens, table, store_from=0):
    for start in range(0, len(tokens), CHUNK):
        logits = runner.run_chunk(tokens[start : start + CHUNK], start, table, store_from, start + CHUNK >= len(tokens))
    return logits


def rows(runner, tokens, positions, tables, sequences, wanted=None):
    positions, sequences = np.asarray(positions, np.int32), np.asarray(sequences, np.int32)
    wanted = np.arange(len(positions), dtype=np.int32) if wanted is None else np.asarray(wanted, np.int32)
    return runner.run_rows(np.asarray(tokens), positions, np.asarray(tables, np.int32), sequences, wanted)


def filled(runner, table, length):
    """The KV of a sequence in token order: [length, layers, 2, heads, dim]."""
    return runner.pool[torch.from_numpy(table).long()].permute(0, 3, 1, 2, 4, 5).flatten(0, 1)[:length].clone()


def generate(runner, prompts, tables, new_tokens):
    """Greedy tokens of all prompts, decoded together, and all their logits."""
    logits = [torch.stack([prefill(runner, prompt, table) for prompt, table in zip(prompts, tables, strict=True)])]
    tokens = [logits[0].argmax(-1).tolist()]
    for step in range(new_tokens):
        positions = [len(prompt) + step for prompt in prompts]
        logits.append(rows(runner, tokens[-1], positions, tables, range(len(prompts))))
        tokens.append(logits[-1].argmax(-1).tolist())
    return tokens, torch.stack(logits)


def test_the_reference_takes_what_the_real_function_takes():
    ours, real = (inspect.signature(function).parameters for function in (reference_attention, varlen_attn))
    assert set(ours) | {"return_aux"} == set(real)
    assert {name for name, p in ours.items() if p.kind is p.KEYWORD_ONLY} <= {
        name for name, p in real.items() if p.kind is p.KEYWORD_ONLY
    }


@pytest.mark.parametrize("batch", [1, 3, 5, 11])
def test_tokens_and_logits_are_those_of_the_cpu_runner(model, batch):
    prompts = [RANDOM.integers(0, VOCAB_SIZE, length) for length in RANDOM.integers(1, 40, batch)]
    tables = RANDOM.permutation(batch * 12).reshape(batch, 12).astype(np.int32)
    cpu = ModelRunner(model, pages(model, batch * 12), PAGE_SIZE, CHUNK)
    expected, expected_logits = generate(cpu, prompts, tables, 6)
    runner = on_device(model, batch * 12)
    tokens, logits = generate(runner, prompts, tables, 6)
    assert tokens == expected
    torch.testing.assert_close(logits, expected_logits, **TOLERANCE)
    assert logits.dtype == torch.float32
    for prompt, table in zip(prompts, tables, strict=True):
        length = len(prompt) + 6
        torch.testing.assert_close(filled(runner, table, length), filled(cpu, table, length), **TOLERANCE)


def test_pages_may_lie_anywhere(model):
    prompt, generated = RANDOM.integers(0, VOCAB_SIZE, 21), RANDOM.integers(0, VOCAB_SIZE, 4)
    results = []
    for table in (np.arange(7), np.array([19, 2, 7, 0, 11, 4, 9])):
        runner, table = on_device(model, 20), table.astype(np.int32)
        first = prefill(runner, prompt, table)
        results.append((first, rows(runner, generated, range(21, 25), table[None], [0] * 4), filled(runner, table, 25)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_row_does_not_depend_on_the_others_of_its_call(llama):
    """Equal shape, equal place, other company: the same bits."""
    tables = np.arange(24, dtype=np.int32).reshape(6, 4)
    tokens = RANDOM.integers(0, VOCAB_SIZE, (6, 9))
    found = []
    for company in (0, 2, 5):
        runner = on_device(llama, 24, buckets=(8,))
        for sequence in range(6):
            prefill(runner, tokens[sequence, :8], tables[sequence])
        members = list(range(company + 1))
        found.append(rows(runner, tokens[members, 8], [8] * len(members), tables, members)[0])
        found.append(filled(runner, tables[0], 9))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[0], found[4])
    assert torch.equal(found[1], found[3])
    assert torch.equal(found[1], found[5])


def test_replaying_is_decoding(model):
    """Several rows of one sequence in one call against one after the other; within tolerance, for the CPU's buckets differ."""
    tokens, table = RANDOM.integers(0, VOCAB_SIZE, 21), np.arange(6, dtype=np.int32)
    one_by_one, together = on_device(model, 6), on_device(model, 6)
    for runner in (one_by_one, together):
        prefill(runner, tokens[:9], table)
    expected = torch.cat([rows(one_by_one, tokens[i : i + 1], [i], table[None], [0]) for i in range(9, 21)])
    torch.testing.assert_close(rows(together, tokens[9:], range(9, 21), table[None], [0] * 12), expected, **TOLERANCE)
    torch.testing.assert_close(filled(together, table, 21), filled(one_by_one, table, 21), **TOLERANCE)


@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
def test_calls_larger_than_the_largest_bucket_are_split_by_position(llama, order):
    """A row needs those before it in its sequence in an earlier part, or in its own."""
    length = 43
    tokens = RANDOM.integers(0, VOCAB_SIZE, (2, length))
    tables = np.arange(22, dtype=np.int32).reshape(2, 11)
    cpu = ModelRunner(llama, pages(llama, 22), PAGE_SIZE, CHUNK)
    sequences, positions = np.repeat([0, 1], length), np.tile(np.arange(length), 2)
    expected = rows(cpu, tokens.reshape(-1), positions, tables, sequences)
    mix = {"forward": np.arange(86), "backward": np.arange(86)[::-1], "shuffled": RANDOM.permutation(86)}[order]
    watched = Watched()
    runner = on_device(llama, 22, attention=watched)
    watched.calls.clear()
    wanted = RANDOM.permutation(86)[:30]
    found = rows(runner, tokens.reshape(-1)[mix], positions[mix], tables, sequences[mix], wanted)
    torch.testing.assert_close(found, expected[mix[wanted]], **TOLERANCE)
    assert [call["rows"] for call in watched.calls[:: llama.num_layers]] == [16] * 5 + [bucket_for(runner, 6)]


def bucket_for(runner, count):
    return min(size for size in runner.buckets if size >= count)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9, 16])
def test_rows_go_into_the_smallest_bucket_that_holds_them(llama, count):
    watched = Watched()
    runner = on_device(llama, 16, attention=watched)
    watched.calls.clear()
    tables = np.arange(16, dtype=np.int32)[:, None]
    rows(runner, RANDOM.integers(0, VOCAB_SIZE, count), [0] * count, tables, range(count))
    assert {call["rows"] for call in watched.calls} == {bucket_for(runner, count)}
    assert {call["queries"] for call in watched.calls} == {bucket_for(runner, count)}


def test_padding_touches_nothing_that_the_call_does_not(llama):
    """Bit by bit over the whole pool: 3 rows in a bucket of 8 change 3 slots. And nothing else is read: the rest is NaN."""
    watched = Watched()
    runner = on_device(llama, 10, buckets=(8,), attention=watched)
    tables = np.array([[7, 1], [3, 9], [5, 0]], np.int32)
    for table, length in zip(tables, (6, 3, 5), strict=True):
        prefill(runner, RANDOM.integers(0, VOCAB_SIZE, length), table)
    before = runner.pool.clone()
    watched.calls.clear()
    assert not bool(rows(runner, [11, 12, 13], [6, 3, 5], tables, [0, 1, 2]).isnan().any())
    changed = runner.pool.view(torch.int32) != before.view(torch.int32)
    slots = {(int(page), int(slot)) for page, _, _, slot, _, _ in changed.nonzero()}
    assert slots == {(1, 2), (3, 3), (0, 1)}
    for call in watched.calls:
        assert call["seqused_k"].tolist() == [7, 4, 6, 1, 1, 1, 1, 1]
        assert call["block_table"][:, :2].tolist() == [[7, 1], [3, 9], [5, 0], *[[7, 1]] * 5]


def test_padding_leaves_the_first_row_as_it_is(llama):
    """Missing rows repeat its write. Alone in a bucket of 8 or among 8, its key and value are what it computed itself."""
    tables = np.arange(8, dtype=np.int32)[:, None]
    alone, full = on_device(llama, 8, buckets=(8,)), on_device(llama, 8, buckets=(8,))
    tokens = RANDOM.integers(0, VOCAB_SIZE, 8)
    first = rows(alone, tokens[:1], [0], tables, [0])
    assert torch.equal(first[0], rows(full, tokens, [0] * 8, tables, range(8))[0])
    assert torch.equal(alone.pool[0, :, :, 0], full.pool[0, :, :, 0])


def test_a_chunk_leaves_what_is_stored_alone(model):
    """The chunk is computed from its first token, even when some of its pages survived, and sees what they hold."""
    tokens, table = RANDOM.integers(0, VOCAB_SIZE, 13), np.array([3, 0, 2, 1], np.int32)
    whole, restored = on_device(model, 4), on_device(model, 4)
    expected = prefill(whole, tokens, table)
    restored.pool[3] = whole.pool[3]
    restored.pool[0] = whole.pool[0]
    mark = restored.pool[[3, 0]].clone()
    assert torch.equal(prefill(restored, tokens, table, store_from=8), expected)
    assert torch.equal(restored.pool[[3, 0]], mark)
    assert torch.equal(filled(restored, table, 13), filled(whole, table, 13))
    restored.pool[3] = 123.0
    restored.run_chunk(tokens, 0, table, 13, False)  # nothing at all to store
    assert bool((restored.pool[3] == 123.0).all())


def test_only_buckets_that_agree_with_the_largest_are_used(llama):
    spoilt = {4: 1.001, 8: 1.0, 16: 1.0}
    runner = on_device(llama, 4, attention=Watched(lambda output, count: output * spoilt.get(count, 1.0)))
    assert 4 not in runner.buckets
    assert runner.buckets[-1] == 16
    assert on_device(llama, 4, attention=Watched(lambda output, count: output * (1 + count / 1000))).buckets == (16,)


@pytest.mark.parametrize("difference", ["logits", "pages", "none"])
def test_a_bucket_agrees_by_its_logits_and_by_its_pages(difference):
    class Replays:
        def replay(self, size):
            logits, stored = torch.zeros(3), torch.zeros(3)
            if size == 4 and difference == "logits":
                logits[1] += 2**-149
            if size == 4 and difference == "pages":
                stored[2] += 2**-149
            return logits, stored

    assert agreeing([4, 8, 16], Replays()) == ([4, 8, 16] if difference == "none" else [8, 16])


def test_every_row_of_the_trial_is_replayed(llama):
    device = torch.device("cpu")
    trial = Trial(llama, PAGE_SIZE, 10, device)
    bucket = RowBucket(llama, 4, PAGE_SIZE, device, reference_attention)
    logits, stored = trial.replay(bucket)
    assert logits.shape == (10, VOCAB_SIZE)
    assert int((stored != 0).any(-1).all(-1)[:, 0, 0].sum()) == 10  # slots that hold a key


def test_the_self_test_passes_and_notices_company(llama):
    assert self_test(on_device(llama, 2, buckets=(16,))) == []

    def company(output, count):
        return output * (1 + output.abs().max() * 1e-3)

    problems = self_test(on_device(llama, 2, buckets=(16,), attention=Watched(company)))
    assert any("logits" in problem for problem in problems)


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
        lambda r, t: rows(r, [VOCAB_SIZE], [0], t[None], [0]),
        lambda r, t: rows(r, [1], [0], t[None], [1]),
        lambda r, t: rows(r, [1], [0], np.array([[-1]], np.int32), [0]),
        lambda r, t: rows(r, [1, 2], [0], t[None], [0]),
    ],
)
def test_calls_that_do_not_fit_are_refused_before_anything_is_written(llama, call):
    runner = on_device(llama, 2)
    with pytest.raises(InvalidCall):
        call(runner, np.arange(2, dtype=np.int32))
    assert bool(runner.pool.isnan().all())


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names, self.mixed = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()}
        self.names.append(str(func))
        if len(devices) > 1 and "copy" not in str(func):
            self.mixed.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_step_stays_on_its_device_and_the_real_operator_takes_its_arguments(llama):
    """On ``meta``, a device that computes nothing: the schema of torch's operator is checked, tensors of two devices do not mix,
    and nothing asks for a number, which would wait for the device and end a capture."""
    module = AutoModelForCausalLM.from_pretrained(llama.folder, attn_implementation=NAME).eval().to("meta")
    slot = CallSlot(2)
    for part in module.modules():
        setattr(part, SLOT_ATTRIBUTE, slot)
    there = dataclasses.replace(llama, module=module, slot=slot, device="meta")
    pool = pages(there, 4).to("meta")
    bucket = RowBucket(there, 8, PAGE_SIZE, pool.device, varlen_attention)
    bucket.fill(np.arange(3), np.arange(3, dtype=np.int32), np.array([[0, 1]], np.int32), np.zeros(3, np.int32))
    with Operations() as operations:
        logits = bucket.compute(pool)
    assert logits.shape == (8, VOCAB_SIZE)
    assert operations.names.count("torch_attn._varlen_attn.default") == llama.num_layers
    assert operations.mixed == []
    assert not [name for name in operations.names if any(part in name for part in ("scalar_dense", "item", "nonzero"))]


def test_a_runner_is_made_for_the_device_of_its_pool(llama):
    assert isinstance(make_runner(llama, pages(llama, 1), PAGE_SIZE, CHUNK), ModelRunner)
    runner = on_device(llama, 1, buckets=(4, 16))
    other = runner.over(pages(llama, 2))
    assert (len(other.pool), other.buckets[-1], other.page_size) == (2, 16, PAGE_SIZE)


@pytest.mark.parametrize("page_size", [1, 16, 128, 257])
def test_page_sizes_that_the_kernel_does_not_read_are_refused_by_flag(page_size):
    with pytest.raises(InvalidCall, match="--page-size 256"):
        check_page_size(page_size)


def test_page_sizes_that_the_kernel_reads():
    check_page_size(256)
    check_page_size(512)


def test_float32_on_a_device_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(UnsupportedModel, match="bfloat16 or float16") as refused:
        load_model(tmp_path / "nowhere", threads=1, device="cuda")
    assert refused.value.field == "dtype"
    with pytest.raises(UnsupportedModel, match="use cpu, cuda"):
        check_device("mps", "bfloat16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_said_in_words(tmp_path):
    with pytest.raises(UnsupportedModel, match="sees no CUDA device") as refused:
        load_model(tmp_path / "nowhere", kv_dtype="bfloat16", threads=1, device="cuda")
    assert refused.value.field == "device"


def test_experts_are_refused_on_a_device_and_served_on_the_cpu(tmp_path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(make_tiny_model(tmp_path / "mixtral", "mixtral"))
    refuse_by_config(config, "mixtral")
    with pytest.raises(UnsupportedModel, match="MixtralForCausalLM") as refused:
        refuse_by_config(config, "mixtral", on_cpu=False)
    assert refused.value.field == "num_experts"


@pytest.mark.parametrize("head_dim", [20, 264])
def test_head_dims_that_the_kernel_does_not_take_are_refused_on_a_device(head_dim):
    seen = ObserveCall(layers=[0], shapes=[(2, head_dim, head_dim)], windows=[None])
    refuse_by_observation(seen, 1, 512, "SomeForCausalLM")
    with pytest.raises(UnsupportedModel, match=f"{head_dim} dimensions"):
        refuse_by_observation(seen, 1, 512, "SomeForCausalLM", on_cpu=False)


def test_the_arithmetic_fingerprint_covers_the_device():
    base = {"threads": 2, "weights": "bf16", "kv_dtype": "bfloat16", "prefill_chunk": 64, "page_size": 256}
    facts = [None, {"buckets": (8, 128)}, {"buckets": (128,)}, {"buckets": (128,), "name": "H200"}]
    assert len({arithmetic_fingerprint(**base, device_facts=some) for some in facts}) == len(facts)
