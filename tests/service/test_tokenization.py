"""Text to tokens without transformers, and equal to transformers."""

import json
import subprocess
import sys
import threading
import time

import pytest

from service.tokenization import ChatTemplateError, Tokenization, TokenizerInvalid
from tests.tiny_models import CHAT_TEMPLATE, MAX_CONTEXT, VOCAB_SIZE, _save_tokenizer

TEXTS = [
    "", " ", "Hello, world!", "  two  spaces\n\n\ttabs", "Zwölf Boxkämpfer", "日本語のテキスト", "👩‍👩‍👧‍👦 family", "e\u0301 é",
    "<|im_start|>user", "a" * 5000, "\x00\x01", "1234567890 3.14",
]  # fmt: skip
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is <b>2 & 2</b>?"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": " c\n"}],
    [{"role": "user", "content": "{{ 7 * 7 }} {% raw %}"}],
]


def make(folder, template=None, **changes):
    _save_tokenizer(folder)
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_CONTEXT, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def test_what_a_folder_says(tmp_path):
    made = Tokenization(make(tmp_path))
    assert (made.context_length, made.vocab_size, made.eos_token_ids) == (MAX_CONTEXT, VOCAB_SIZE, (2,))
    assert made.token_text(made.encode("x")[0]) == "x"


def test_end_tokens_of_the_generation_config_win(tmp_path):
    make(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert Tokenization(tmp_path).eos_token_ids == (2, 0)


@pytest.mark.parametrize("key", ["n_positions", "n_ctx"])
def test_other_names_of_the_context_length(tmp_path, key):
    make(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({key: 77, "vocab_size": 512}))
    assert Tokenization(tmp_path).context_length == 77


def test_a_missing_or_broken_file_is_named(tmp_path):
    make(tmp_path)
    for name in ("config.json", "tokenizer.json"):
        content = (tmp_path / name).read_text()
        (tmp_path / name).write_text("{")
        with pytest.raises(TokenizerInvalid, match=name):
            Tokenization(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(TokenizerInvalid, match=name):
            Tokenization(tmp_path)
        (tmp_path / name).write_text(content)
    Tokenization(tmp_path)


def test_truncation_and_padding_of_a_training_run_are_dropped(tmp_path):
    from tokenizers import Tokenizer

    make(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert 4 < len(Tokenization(tmp_path).encode("the quick brown fox jumps")) < 64


def test_what_templates_are_given(tmp_path):
    template = (
        "{{ bos_token }}|{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}|{{ strftime_now('%Y') | length }}|{{ tools is none }}"
    )
    made = Tokenization(make(tmp_path, template))
    messages = [{"role": "user", "content": "<é>"}, {"role": "skip", "content": ""}]
    assert made.render_chat(messages) == '<|im_start|>|{"role": "user", "content": "<é>"}|4|True'


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}", "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}",
        "{{ messages[9].content + 1 }}", "{{ messages[0].content / 0 }}",
    ],
)  # fmt: skip
def test_what_a_template_refuses_or_may_not_do_is_an_error(tmp_path, template):
    with pytest.raises(ChatTemplateError):
        Tokenization(make(tmp_path, template)).render_chat(CHATS[0])


def test_without_a_template_there_is_no_chat(tmp_path):
    make(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ChatTemplateError, match="prompt"):
        Tokenization(tmp_path).render_chat(CHATS[0])


def test_named_templates(tmp_path):
    make(tmp_path)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenization(tmp_path).render_chat(CHATS[0]) == "plain"


def test_it_needs_neither_torch_nor_transformers():
    code = "import sys, service.tokenization; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.model
def test_equal_to_transformers_on_the_demo_model():
    from transformers import AutoTokenizer

    from engine.model_source import resolve

    folder = resolve("demo")
    ours, theirs = Tokenization(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
    for chat in CHATS:
        rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(chat) == rendered
        assert ours.render_chat(chat, add_generation_prompt=False) == theirs.apply_chat_template(chat, tokenize=False)
        tokens = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert ours.encode_chat(chat) == list(tokens)
    assert ours.context_length == 8192
    assert theirs.eos_token_id in ours.eos_token_ids


@pytest.mark.parametrize("chat", [False, True])
def test_a_long_prompt_does_not_hold_the_interpreter(tmp_path, chat):
    """Else a thread of its own is no help: every stream of the api would stand still meanwhile."""
    tokenization = Tokenization(make(tmp_path, CHAT_TEMPLATE))
    text = "The quick brown fox jumps over the lazy dog. " * 20_000
    work = (lambda: tokenization.encode_chat([{"role": "user", "content": text}])) if chat else (lambda: tokenization.encode(text))
    thread = threading.Thread(target=work)
    began = last = time.monotonic()
    longest = 0.0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    assert longest < (last - began) / 2, f"nothing else ran for {longest:.2f} of {last - began:.2f} s"
