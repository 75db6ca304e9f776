"""Each supported architecture writes what transformers' own ``generate`` writes; the others are refused by name.

Every such comparison is proved by sabotage: with attention zeroed, halved or shifted it must fail, else it would prove nothing.
"""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.attention import NAME, SLOT_ATTRIBUTE, paged_attention
from engine.calls import CallSlot, ObserveCall
from engine.errors import ModelFilesInvalid, ModelNotFound, UnsupportedModel
from engine.model import load_model
from engine.probe import eager_logits, probe_tokens, refuse_difference
from engine.runner import make_runner
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

SUPPORTED = ["llama", "qwen2", "qwen3", "mistral", "gemma", "phi3", "mixtral", "gpt2"]
PAGE_SIZE, CHUNK, NEW_TOKENS = 4, 16, 24
PROMPT = np.random.default_rng(7).integers(3, VOCAB_SIZE, 37)
LLAMA_SHAPED = ["llama", "mistral", "qwen2", "qwen3"]
SABOTAGE = {
    "zeroed": lambda output: output * 0,
    "halved": lambda output: output * 0.5,
    "shifted": lambda output: output.roll(1, -1),
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    made = {}

    def get(architecture, fused=True):
        if (architecture, fused) not in made:
            folder = make_tiny_model(tmp_path_factory.mktemp("zoo") / architecture, architecture)
            made[architecture, fused] = (load_model(folder, threads=2, fused=fused), expected_tokens(folder))
        return made[architecture, fused]

    return get


def expected_tokens(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    prompt = torch.from_numpy(PROMPT)[None]
    written = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW_TOKENS)
    return written[0, len(PROMPT) :].tolist()


def greedy_tokens(model):
    num_pages = -(-(len(PROMPT) + NEW_TOKENS) // PAGE_SIZE)
    runner = make_runner(model, torch.zeros(num_pages, *model.geometry(PAGE_SIZE).page_shape), PAGE_SIZE, CHUNK)
    table = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    for start in range(0, len(PROMPT), CHUNK):
        logits = runner.run_chunk(PROMPT[start : start + CHUNK], start, table, start, start + CHUNK >= len(PROMPT))
    tokens = [int(logits.argmax())]
    zero = np.zeros(1, np.int32)
    while len(tokens) < NEW_TOKENS:
        position = np.array([len(PROMPT) + len(tokens) - 1], np.int32)
        tokens.append(int(runner.run_rows(np.array(tokens[-1:]), position, table[None], zero, zero)[0].argmax()))
    return tokens


@pytest.mark.parametrize(
    ("architecture", "fused"),
    [(name, True) for name in (*SUPPORTED, "gpt_neox", "opt", "phi")] + [(name, False) for name in LLAMA_SHAPED],
)
def test_greedy_tokens_are_those_of_generate(zoo, architecture, fused):
    model, expected = zoo(architecture, fused)
    assert (model.llama is not None) == (fused and architecture in LLAMA_SHAPED)
    assert len(set(expected)) > 8, "a model that repeats itself would pass whatever attention does"
    assert greedy_tokens(model) == expected


@pytest.mark.parametrize("kind", SABOTAGE)
@pytest.mark.parametrize("architecture", SUPPORTED)
def test_sabotaged_attention_is_noticed(zoo, architecture, kind):
    model, expected = zoo(architecture, fused=False)

    def sabotage(module, args, output):
        return (SABOTAGE[kind](output[0]), *output[1:])

    hooks = [part.register_forward_hook(sabotage) for part in model.module.modules() if type(part).__name__.endswith("Attention")]
    assert len(hooks) == model.num_layers
    try:
        assert greedy_tokens(model) != expected
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("part", ["out", "gate_up", "qkv", "input_norm", "post_norm", "final_norm", "embedding"])
@pytest.mark.parametrize("architecture", LLAMA_SHAPED)
def test_sabotaged_weights_of_the_fused_path_are_noticed(zoo, architecture, part):
    model, expected = zoo(architecture)
    weights = getattr(model.llama.weights, part)
    before = weights.copy()
    weights[...] = np.roll(weights, 1, -1)
    try:
        assert greedy_tokens(model) != expected
    finally:
        weights[...] = before


@pytest.mark.parametrize(("architecture", "part"), [("qwen2", "qkv_bias"), ("qwen3", "query_norm"), ("qwen3", "key_norm")])
def test_what_only_some_have_is_used(zoo, architecture, part):
    model, expected = zoo(architecture)
    weights = getattr(model.llama.weights, part)
    before = weights.copy()
    weights[...] *= -1.5
    try:
        assert greedy_tokens(model) != expected
    finally:
        weights[...] = before


@pytest.mark.parametrize(
    ("architecture", "name", "field"),
    [
        ("bloom", "BloomForCausalLM", "alibi"),
        ("gemma2", "Gemma2ForCausalLM", "softcap"),
        ("gpt_oss", "GptOssForCausalLM", "s_aux"),
        ("mamba", "MambaForCausalLM", "layer_types"),
        ("t5", "T5ForConditionalGeneration", "is_encoder_decoder"),
        ("deepseek_v3", "DeepseekV3ForCausalLM", "v_head_dim"),
    ],
)
def test_refused_by_name(tmp_path, architecture, name, field):
    with pytest.raises(UnsupportedModel, match=name) as refused:
        load_model(make_tiny_model(tmp_path / "model", architecture), threads=2)
    assert refused.value.field == field
    assert refused.value.hint


def test_a_window_shorter_than_the_context_is_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match="64 tokens is shorter than the context of 512"):
        load_model(make_tiny_model(tmp_path / "short", "mistral", sliding_window=64), threads=2)


def test_a_window_as_long_as_the_context_is_none(tmp_path):
    assert load_model(make_tiny_model(tmp_path / "long", "mistral", sliding_window=512), threads=2).max_context == 512


def test_rotary_frequencies_that_depend_on_the_batch_are_refused(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModel) as refused:
        load_model(make_tiny_model(tmp_path / "model", rope_parameters=rope), threads=2)
    assert refused.value.field == "rope_type"


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias", "something_new"])
def test_an_argument_that_we_would_ignore_is_refused_by_name(name):
    module = torch.nn.Module()
    module.layer_idx = 0
    slot = CallSlot(threads=1)
    slot.call = ObserveCall()
    setattr(module, SLOT_ATTRIBUTE, slot)
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(UnsupportedModel, match=name):
        paged_attention(module, q, q, q, None, scaling=1.0, **{name: torch.ones(1)})
    paged_attention(module, q, q, q, None, scaling=1.0, **{name: None})


def test_a_model_whose_logits_differ_from_eager_attention_is_refused(tmp_path):
    """GPT-2 may scale its scores anew in each layer; here the config lies about it after the weights are loaded."""
    model = load_model(make_tiny_model(tmp_path / "model", "gpt2"), threads=2)
    tokens = probe_tokens(model.max_context, model.vocab_size)
    model.module.transformer.h[1].attn.scaling *= 1.5
    refuse_difference(model, tokens, eager_logits(model.module, tokens))  # both sides see the same scaling
    hook = model.module.transformer.h[1].attn.register_forward_hook(
        lambda module, args, output: (output[0] * (1.0 if module.config._attn_implementation == NAME else 1.1), *output[1:])
    )
    with pytest.raises(UnsupportedModel, match="eager"):
        refuse_difference(model, tokens, eager_logits(model.module, tokens))
    hook.remove()


def test_missing_weights_are_not_made_up(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = make_tiny_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFilesInvalid, match="up_proj"):
        load_model(folder, threads=2)


def test_code_that_a_model_brings_along_is_not_run(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UnsupportedModel, match="homemade"):
        load_model(folder, threads=2)


def test_what_load_model_says_of_a_model(zoo, tmp_path):
    model, _ = zoo("llama")
    assert (model.architecture, model.vocab_size, model.max_context, model.eos_token_ids) == ("LlamaForCausalLM", 512, 512, (2,))
    assert model.geometry(8).page_shape == (2, 2, 8, 2, 16)
    with pytest.raises(ModelNotFound):
        load_model(tmp_path / "nowhere", threads=1)
