"""The engine on a CUDA device: needs one, runs unattended where there is one. Every comparison of our own results is ``==``."""

import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from engine.cuda_rows import eager
from engine.cuda_runner import BUCKETS, CudaRunner
from engine.cuda_swap import CudaSwap
from engine.errors import InvalidCall, UnsupportedModel
from engine.exactness import arithmetic_fingerprint, self_test
from engine.model import load_model
from engine.pools import DTYPES, DevicePool, HostPool
from engine.runner import make_runner
from engine.swap import Direction, PageMove, Transfer
from engine.swap_factory import make_swap
from tests.rigs import CheckedMemory
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

DEVICE, PAGE_SIZE, CHUNK = "cuda", 256, 64
OUT, IN = Direction.OUT, Direction.IN
RANDOM = np.random.default_rng(17)
# Four query heads to a kv head, a head dim that kernels are made for, and a width that is no multiple of anything.
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 684,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma", "phi3", "gpt2", "gpt_neox", "opt", "phi"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("cuda") / "llama", **SHAPE)


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def model(request, folder):
    return load_model(folder, kv_dtype=request.param, threads=2, device=DEVICE)


@pytest.fixture(scope="module")
def half(folder):
    return load_model(folder, kv_dtype="bfloat16", threads=2, device=DEVICE)


def pages(model, num_pages):
    # Not zeros: whatever is read without having been written shows up as NaN.
    shape = (num_pages, *model.geometry(PAGE_SIZE).page_shape)
    return torch.full(shape, torch.nan, dtype=DTYPES[model.kv_dtype], device=DEVICE)


def new_runner(model, num_pages):
    return make_runner(model, pages(model, num_pages), PAGE_SIZE, CHUNK)


def prefill(runner, tokens, table, store_from=0, first=0):
    logits = None
    for start in range(first, len(tokens), CHUNK):
        logits = runner.run_chunk(tokens[start : start + CHUNK], start, table, store_from, start + CHUNK >= len(tokens))
    return logits


def rows(runner, tokens, positions, tables, sequences):
    positions, sequences = np.asarray(positions, np.int32), np.asarray(sequences, np.int32)
    wanted = np.arange(len(positions), dtype=np.int32)
    return runner.run_rows(np.asarray(tokens), positions, np.asarray(tables, np.int32), sequences, wanted)


def filled(runner, table, length):
    """The KV of a sequence in token order: [length, layers, 2, heads, dim]."""
    there = runner.pool[torch.from_numpy(table).long().to(DEVICE)]
    return there.permute(0, 3, 1, 2, 4, 5).flatten(0, 1)[:length].cpu()


# --- arithmetic ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures_load_and_are_exact(tmp_path, architecture):
    """Loading compares a probe with the model's own eager attention; the self-test compares rows alone and among others."""
    model = load_model(make_tiny_model(tmp_path / architecture, architecture), kv_dtype="bfloat16", threads=2, device=DEVICE)
    assert self_test(new_runner(model, 1)) == []


def test_the_self_test_passes(model, record_property):
    runner = new_runner(model, 1)
    record_property("buckets", str(runner.buckets))
    assert set(runner.buckets) <= set(BUCKETS)
    assert runner.buckets[-1] == BUCKETS[-1]
    assert self_test(runner) == []


@pytest.mark.parametrize("batch", [2, 8, 9, 40, 130])
def test_a_sequence_alone_and_in_a_batch_has_the_same_logits_and_pages(half, batch):
    """Three steps of decoding over the end of a page, for every sequence of a batch."""
    prompts = RANDOM.integers(0, VOCAB_SIZE, (batch, PAGE_SIZE - 1))
    tokens = RANDOM.integers(0, VOCAB_SIZE, (batch, 3))
    tables = RANDOM.permutation(2 * batch).reshape(batch, 2).astype(np.int32)
    together, alone = new_runner(half, 2 * batch), new_runner(half, 2 * batch)
    for runner in (together, alone):
        for prompt, table in zip(prompts, tables, strict=True):
            prefill(runner, prompt, table)
    for step in range(3):
        position = PAGE_SIZE - 1 + step
        found = rows(together, tokens[:, step], [position] * batch, tables, range(batch))
        expected = torch.cat([rows(alone, tokens[i, step : step + 1], [position], tables, [i]) for i in range(batch)])
        assert torch.equal(found, expected)
    for table in tables:
        assert torch.equal(filled(together, table, PAGE_SIZE + 2), filled(alone, table, PAGE_SIZE + 2))


def test_replaying_is_decoding(model):
    """300 rows of one sequence one by one, in one call (which is split), and in calls of every size between."""
    tokens, table = RANDOM.integers(0, VOCAB_SIZE, 350), np.array([2, 0], np.int32)
    results = []
    for step in (1, 7, 100, 300):
        runner = new_runner(model, 3)
        prefill(runner, tokens[:50], table)
        logits = [rows(runner, tokens[i : i + step], range(i, min(i + step, 350)), table[None], [0] * len(tokens[i : i + step]))
                  for i in range(50, 350, step)]  # fmt: skip
        results.append((torch.cat(logits), filled(runner, table, 350)))
    for logits, stored in results[1:]:
        assert torch.equal(logits, results[0][0])
        assert torch.equal(stored, results[0][1])
    assert not bool(results[0][0].isnan().any())


def test_pages_may_lie_anywhere(model):
    prompt, generated = RANDOM.integers(0, VOCAB_SIZE, 600), RANDOM.integers(0, VOCAB_SIZE, 4)
    results = []
    for table in ([0, 1, 2], [9, 2, 7]):
        runner, table = new_runner(model, 10), np.array(table, np.int32)
        first = prefill(runner, prompt, table)
        results.append((first, rows(runner, generated, range(600, 604), table[None], [0] * 4), filled(runner, table, 604)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("survived", [1, 2])
def test_a_chunk_recomputed_around_surviving_pages_is_the_same_and_leaves_them_alone(model, survived):
    prompt, table = RANDOM.integers(0, VOCAB_SIZE, 700), np.arange(3, dtype=np.int32)
    whole, restored = new_runner(model, 3), new_runner(model, 3)
    expected = prefill(whole, prompt, table)
    restored.pool[:survived] = whole.pool[:survived]
    mark, store_from = restored.pool[:survived].clone(), survived * PAGE_SIZE
    assert torch.equal(prefill(restored, prompt, table, store_from, first=store_from // CHUNK * CHUNK), expected)
    assert torch.equal(restored.pool[:survived], mark)
    assert torch.equal(filled(restored, table, 700), filled(whole, table, 700))


def test_graphs_are_eager(model):
    """The same calls through captured graphs and kernel by kernel, over all buckets."""
    graphs = new_runner(model, 1)
    plain = CudaRunner(model, pages(model, 1), PAGE_SIZE, CHUNK, buckets=graphs.buckets, launcher=eager)
    table, tokens = np.zeros((1, 1), np.int32), RANDOM.integers(0, VOCAB_SIZE, 256)
    start = 0
    for count in (1, 8, 9, 17, 40, 100):
        call = (tokens[start : start + count], range(start, start + count), table, [0] * count)
        assert torch.equal(rows(graphs, *call), rows(plain, *call))
        start += count
    assert torch.equal(filled(graphs, table[0], start), filled(plain, table[0], start))


def test_padding_touches_nothing_that_the_call_does_not(half):
    """Bit by bit over the whole pool: 3 rows change 3 slots. And nothing else is read: the rest is NaN."""
    runner, tables = new_runner(half, 6), np.array([[4, 1], [3, 5], [0, 2]], np.int32)
    for table, length in zip(tables, (260, 3, 255), strict=True):
        prefill(runner, RANDOM.integers(0, VOCAB_SIZE, length), table)
    before = runner.pool.clone()
    assert not bool(rows(runner, [11, 12, 13], [260, 3, 255], tables, [0, 1, 2]).isnan().any())
    changed = (runner.pool.view(torch.int16) != before.view(torch.int16)).cpu()
    assert {(int(page), int(slot)) for page, _, _, slot, _, _ in changed.nonzero()} == {(1, 4), (3, 3), (0, 255)}


def test_graphs_are_captured_while_others_use_the_device(half):
    """A second engine part that copies and waits must not end a capture, nor a capture its copies."""
    stop, failures = threading.Event(), []

    def copy():
        stream, pinned = torch.cuda.Stream(), torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
        device = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)
        try:
            while not stop.is_set():
                with torch.cuda.stream(stream):
                    pinned.copy_(device, non_blocking=True)
                    done = torch.cuda.Event(blocking=True)
                    done.record(stream)
                done.synchronize()
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        runner = new_runner(half, 1)
    finally:
        stop.set()
        thread.join()
    assert failures == []
    assert self_test(runner) == []


def test_another_process_computes_the_same_bits(half):
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.engine.test_cuda import digest_of_a_run\n"
        "print(digest_of_a_run(Path(sys.argv[1])))\n"
    )
    command = [sys.executable, "-c", script, str(half.folder)]
    there = subprocess.run(command, capture_output=True, text=True, check=True, timeout=170).stdout.strip().splitlines()[-1]
    assert there == digest_of_a_run(half.folder)


def digest_of_a_run(folder: Path) -> str:
    model = load_model(folder, kv_dtype="bfloat16", threads=2, device=DEVICE)
    runner, table = new_runner(model, 2), np.array([1, 0], np.int32)
    tokens = np.random.default_rng(11).integers(0, VOCAB_SIZE, 300)
    logits = [prefill(runner, tokens[:250], table)[None], rows(runner, tokens[250:], range(250, 300), table[None], [0] * 50)]
    stored = filled(runner, table, 300).view(torch.uint8)
    return hashlib.blake2b(torch.cat(logits).numpy().tobytes() + stored.numpy().tobytes()).hexdigest()


# --- against transformers -----------------------------------------------------------------------------------------------


def forced_choices(folder, tokens, start, dtype, attention, best):
    """What transformers picks after each of ``tokens[start - 1 :]``, given all before it: int [len, best]."""
    from transformers import AutoModelForCausalLM

    there = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval().to(DEVICE)
    with torch.inference_mode():
        logits = there(input_ids=torch.tensor([tokens], device=DEVICE), use_cache=False).logits[0, start - 1 : -1]
    return logits.topk(best).indices.cpu()


def generated(folder, prompt, dtype, count):
    from transformers import AutoModelForCausalLM

    there = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval().to(DEVICE)
    there.generation_config.eos_token_id = None
    ids = torch.from_numpy(prompt)[None].to(DEVICE)
    written = there.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return written[0].tolist()


def our_choices(model, tokens, start):
    """Ours after each of ``tokens[start - 1 :]``, chunks before it and one row at a time from it on."""
    runner, table = new_runner(model, 2), np.array([1, 0], np.int32)
    choices = [int(prefill(runner, np.array(tokens[:start]), table).argmax())]
    for position in range(start, len(tokens) - 1):
        choices.append(int(rows(runner, tokens[position : position + 1], [position], table[None], [0])[0].argmax()))
    return choices


def stays_within(choices, allowed):
    return all(choice in options for choice, options in zip(choices, allowed, strict=True))


def test_greedy_tokens_are_those_of_transformers(model):
    """Along the text that ``generate`` writes in the same dtype, each of our tokens is the one that transformers picks in that
    dtype, with eager or with SDPA attention, or one of the two best of float32.

    In 16 bits the order of sums decides between two tokens that are nearly equal, so that transformers' own two attentions do not
    always write the same text, and "equal to generate" would ask for more than it gives. No number is compared with a tolerance.
    Attention that is off by a third fails.
    """
    dtype, start, count = DTYPES[model.kv_dtype], 240, 40
    tokens = generated(model.folder, RANDOM.integers(3, VOCAB_SIZE, start), dtype, count)
    assert len(set(tokens[start:])) > 8, "a model that repeats itself would pass whatever attention does"
    options = [
        forced_choices(model.folder, tokens, start, dtype, "eager", 1),
        forced_choices(model.folder, tokens, start, dtype, "sdpa", 1),
        forced_choices(model.folder, tokens, start, torch.float32, "eager", 2),
    ]
    allowed = torch.cat(options, dim=1).tolist()
    assert stays_within(our_choices(model, tokens, start), allowed)
    parts = [part for part in model.module.modules() if type(part).__name__.endswith("Attention")]
    hooks = [part.register_forward_hook(lambda module, args, output: (output[0] * 0.67, *output[1:])) for part in parts]
    try:
        assert not stays_within(our_choices(model, tokens, start), allowed)
    finally:
        for hook in hooks:
            hook.remove()


# --- refusals and facts -------------------------------------------------------------------------------------------------


def test_a_page_size_that_the_kernel_does_not_read_is_refused(half):
    pool = torch.zeros(1, *half.geometry(16).page_shape, dtype=DTYPES[half.kv_dtype], device=DEVICE)
    with pytest.raises(InvalidCall, match="--page-size 256"):
        make_runner(half, pool, 16, CHUNK)


def test_models_and_devices_that_cannot_be_exact_are_refused(folder, tmp_path):
    with pytest.raises(UnsupportedModel, match="experts"):
        load_model(make_tiny_model(tmp_path / "mixtral", "mixtral"), kv_dtype="bfloat16", threads=1, device=DEVICE)
    with pytest.raises(UnsupportedModel, match="bfloat16 or float16"):
        load_model(folder, threads=1, device=DEVICE)
    with pytest.raises(UnsupportedModel, match="there is no cuda:99"):
        load_model(folder, kv_dtype="bfloat16", threads=1, device="cuda:99")


def test_the_fingerprint_takes_the_facts_of_the_device(half):
    facts = new_runner(half, 1).device_facts
    assert json.loads(json.dumps(facts))["name"] == torch.cuda.get_device_name()
    base = {"threads": 2, "weights": "bf16", "kv_dtype": "bfloat16", "prefill_chunk": CHUNK, "page_size": PAGE_SIZE}
    assert arithmetic_fingerprint(**base, device_facts=facts) != arithmetic_fingerprint(**base)


# --- swap ---------------------------------------------------------------------------------------------------------------


class Backing(CheckedMemory):
    failing = False

    def write_pages(self, first, data):
        if self.failing:
            raise OSError("no room")
        return super().write_pages(first, data)


@pytest.fixture
def swap_rig(half):
    geometry = half.geometry(PAGE_SIZE)
    device = DevicePool(16, geometry, device=DEVICE)
    backing = Backing(16, geometry.page_bytes)
    swap = make_swap(device, HostPool(16, geometry, backing))
    assert isinstance(swap, CudaSwap)
    yield device, backing, swap
    swap.close()


def transfer(swap, way, moves):
    swap.submit(Transfer(way, tuple(moves)))
    (done,) = swap.completed(wait=60)
    return done


def scribble(device, page):
    """Random bits on one page that are no NaN in any 16-bit format, as bytes."""
    content = torch.from_numpy(np.random.default_rng(page).integers(0, 0x3C, device.bytes.shape[1]).astype(np.uint8))
    device.bytes[page].copy_(content)
    return content


def test_pages_go_out_and_come_back_elsewhere(swap_rig):
    device, _, swap = swap_rig
    away = [(0, 5), (1, 6), (2, 7), (9, 0), (4, 14), (11, 3)]
    content = {host: scribble(device, page) for page, host in away}
    out = transfer(swap, OUT, [PageMove(page, host) for page, host in away])
    assert out.problems == ("",) * 6
    assert out.checksums == tuple(xxhash.xxh3_64_intdigest(content[host].numpy()) for _, host in away)
    device.bytes.zero_()
    back = [(15, 5), (14, 6), (3, 7), (5, 0), (6, 14), (12, 3)]
    checksums = dict(zip((host for _, host in away), out.checksums, strict=True))
    into = transfer(swap, IN, [PageMove(page, host, checksums[host]) for page, host in back])
    assert into.problems == ("",) * 6
    for page, host in back:
        assert torch.equal(device.bytes[page].cpu(), content[host])


def test_a_page_leaves_after_the_computation_that_was_queued(swap_rig):
    device, backing, swap = swap_rig
    torch.cuda._sleep(200_000_000)  # a tenth of a second or so; the copy would be done long before
    device.bytes[3].fill_(7)
    assert transfer(swap, OUT, [PageMove(3, 1)]).problems == ("",)
    assert (backing.pages[1] == 7).all()


def test_a_page_comes_after_the_computation_that_was_queued(swap_rig):
    device, backing, swap = swap_rig
    old = scribble(device, 3)
    backing.pages[1] = 9
    torch.cuda._sleep(200_000_000)
    seen = device.bytes[3].clone()
    assert transfer(swap, IN, [PageMove(3, 1, xxhash.xxh3_64_intdigest(backing.pages[1]))]).problems == ("",)
    now = device.bytes[3].clone()
    assert torch.equal(seen.cpu(), old)
    assert bool((now == 9).all())


def test_what_goes_wrong_is_a_problem_of_its_pages(swap_rig):
    device, backing, swap = swap_rig
    for page in (0, 1, 2):
        scribble(device, page)
    out = transfer(swap, OUT, [PageMove(page, page) for page in (0, 1, 2)])
    backing.pages[1, 1000] ^= 4
    device.bytes.zero_()
    into = transfer(swap, IN, [PageMove(page, page, out.checksums[page]) for page in (0, 1, 2)])
    assert into.problems == ("", "checksum differs", "")
    assert int(device.bytes[1].sum()) == 0
    assert int(device.bytes[2].sum()) != 0
    backing.failing = True
    assert transfer(swap, OUT, [PageMove(0, 9)]).problems == ("no room",)
    backing.failing = False
    assert transfer(swap, OUT, [PageMove(0, 9)]).problems == ("",)


def test_decoding_goes_on_between_pages_that_come_and_go(half, swap_rig):
    """Sequences decode on every second page while all others go out and come back, over and over; their tokens, and every byte that
    travelled, are those of a run without any traffic."""
    device, _, swap = swap_rig
    tables = np.arange(0, 16, 2, dtype=np.int32)[:, None]
    steps, others = 60, list(range(1, 16, 2))
    tokens = RANDOM.integers(0, VOCAB_SIZE, (8, steps))
    quiet = new_runner(half, 16)
    expected = [rows(quiet, tokens[:, step], [step] * 8, tables, range(8)) for step in range(steps)]

    runner = make_runner(half, device.tensor, PAGE_SIZE, CHUNK)
    content = {page: scribble(device, page) for page in others}
    checksums = {page: xxhash.xxh3_64_intdigest(content[page].numpy()) for page in others}
    trips = dict.fromkeys(others, 0)

    def send_back(finished):
        for done in finished:
            (move,) = done.transfer.moves
            page = move.device_page
            assert done.problems == ("",)
            assert done.checksums == (checksums[page],)
            trips[page] += 1
            if done.transfer.direction is OUT:
                device.bytes[page].zero_()
                swap.submit(Transfer(IN, (PageMove(page, page, checksums[page]),)))
            else:
                assert torch.equal(device.bytes[page].cpu(), content[page])
                swap.submit(Transfer(OUT, (PageMove(page, page),)))

    for page in others:
        swap.submit(Transfer(OUT, (PageMove(page, page),)))
    for step in range(steps):
        assert torch.equal(rows(runner, tokens[:, step], [step] * 8, tables, range(8)), expected[step])
        send_back(swap.completed())
    while min(trips.values()) < 4:
        send_back(swap.completed(wait=60))
    while swap.in_flight:
        assert all(done.problems == ("",) for done in swap.completed(wait=60))
    for sequence in range(8):
        assert torch.equal(filled(runner, tables[sequence], steps), filled(quiet, tables[sequence], steps))
