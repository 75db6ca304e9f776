"""Tiny seeded models in real folders, so that tests take the real loading path in milliseconds.

They are made to discriminate: a freshly initialised model often repeats one token whatever its attention does (GPT-2 passes a
comparison with zeroed attention), so matrices are scaled up until the logits depend on every part of the context.
``test_model_zoo.py`` proves it by sabotage.
"""

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
MAX_CONTEXT = 512
END_OF_TEXT, BEGIN_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TRAINING_TEXT = """
A server that dies in the middle of a sentence should go on from where it was, token for token, as if nothing had happened.
The log is the truth; the pages are a verified cache of that truth. Losing a page costs time, never a token. The quick brown fox
jumps over the lazy dog while the engine writes another page of keys and values, and the scheduler decides who runs next. Once
upon a time there was a small model with two layers that answered every question with nonsense, but always with the same
nonsense, whoever else was asking. Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Voix ambiguë d'un cœur qui au
zéphyr préfère les jattes de kiwis.
"""


def make_tiny_model(folder: Path, architecture: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """Save a random model of ``architecture`` with tokenizer and chat template into ``folder`` (made if need be), and return
    the folder.

    ``architecture`` is a key of ``ARCHITECTURES``; ``overrides`` go to its transformers config. Equal arguments give equal
    weights.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    _save_tokenizer(folder)
    name, settings = ARCHITECTURES[architecture]
    config_class = getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}{'ForConditionalGeneration' if architecture == 't5' else 'ForCausalLM'}", None)
    model_class = model_class or getattr(transformers, f"{name}LMHeadModel")
    config = config_class(**{**_COMMON, **settings, **overrides})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = model_class(config).eval()
        for label, weight in model.named_parameters():
            if weight.dim() >= 2 and not any(part in label for part in ("embed", "lm_head", "wte", "wpe", "router", "shared.")):
                weight.mul_(_SCALE)
            elif weight.dim() == 1:
                # Norm weights of exactly one and biases of exactly zero would hide a forgotten one.
                weight.add_(torch.randn_like(weight), alpha=0.1)
    model.save_pretrained(folder)
    return folder


def _save_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of exactly ``VOCAB_SIZE`` tokens: any text, any language, any emoji goes through it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    specials = [AddedToken(text, special=True, normalized=False) for text in (END_OF_TEXT, BEGIN_TURN, END_TURN)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TURN,
        "bos_token": BEGIN_TURN,
        "pad_token": END_OF_TEXT,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


_SCALE = 5.0
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.05,
}
# 172 is no multiple of a vector: the ops whose bits depend on the neighbours of a row show themselves at such widths.
_LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": MAX_CONTEXT, "n_ctx": MAX_CONTEXT}
_SIMPLE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _LLAMA),
    "qwen2": ("Qwen2", _LLAMA),
    "qwen3": ("Qwen3", _LLAMA),
    "mistral": ("Mistral", {**_LLAMA, "sliding_window": None}),
    "gemma": ("Gemma", _LLAMA),
    "phi3": ("Phi3", {**_LLAMA, "sliding_window": None}),
    "mixtral": ("Mixtral", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "gpt2": ("GPT2", {**_GPT, "tie_word_embeddings": False}),
    "gpt_neox": ("GPTNeoX", _SIMPLE),
    "opt": (
        "OPT",
        {"hidden_size": 64, "ffn_dim": 172, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 64},
    ),
    "phi": ("Phi", _SIMPLE),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **{key: value for key, value in _LLAMA.items() if key != "head_dim"},
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    "bloom": ("Bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "gemma2": ("Gemma2", _LLAMA),
    "gpt_oss": ("GptOss", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mamba": ("Mamba", {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
    "t5": ("T5", {"d_model": 64, "d_kv": 16, "d_ff": 172, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}),
}
