"""The bytes of tokens, put together, are the bytes of the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from service.token_bytes import bytes_of_tokens
from tests.tiny_models import _save_tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    _save_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def sentence_piece():
    """As Llama 2 and Mistral have it: a space as a sign, what the vocabulary lacks as bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "é", "▁a"]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@given(text=st.text() | st.text("ab é🎈日"))
def test_of_byte_level_tokenizers(byte_level, text):
    of = bytes_of_tokens(byte_level)
    assert b"".join(map(of, byte_level.encode(text, add_special_tokens=False).ids)) == text.encode()


@given(text=st.text("ab é🎈日\n"))
def test_of_tokenizers_with_a_byte_fallback(sentence_piece, text):
    of = bytes_of_tokens(sentence_piece)
    assert b"".join(map(of, sentence_piece.encode(text).ids)) == text.encode()


def test_special_tokens_are_their_names_and_rows_without_a_token_nothing(byte_level):
    of = bytes_of_tokens(byte_level)
    assert of(byte_level.token_to_id("<|im_start|>")) == b"<|im_start|>"
    assert of(10**6) == b""
