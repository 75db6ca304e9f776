"""Text as it comes: whole characters, nothing of a stop string, and the same text however it is cut into pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine import model_source
from engine.detokenizer import Detokenizer
from engine.output import OutputText, Piece
from tests.tiny_models import END_TURN, VOCAB_SIZE

MIXED = "Grüße! 日本語のテキスト, עברית, 👩‍👩‍👧‍👦 und 🇩🇪; é (e + accent), \U00020000, tabs\tand\n\nlines."
texts = st.text(st.characters(codec="utf-8"), max_size=60)


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    return Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def demo():
    return Tokenizer.from_file(str(model_source.resolve("demo") / "tokenizer.json"))


@pytest.fixture(scope="module")
def sentencepiece():
    """As in Llama 2 and Mistral: words begin with ▁, unknown characters fall back to bytes, the first space is taken away."""
    pieces = ["<unk>", "▁", "▁Hello", "▁world", "o", *(chr(c) for c in range(33, 111)), *(f"<0x{b:02X}>" for b in range(256))]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def pieces_of(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(i) for i in ids] + [detokenizer.flush()]


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("which", ["tiny", "demo", "sentencepiece"])
def test_pieces_are_whole_characters_and_make_the_text(which, request):
    tokenizer = request.getfixturevalue(which)
    pieces = pieces_of(tokenizer, encode(tokenizer, MIXED))
    assert "".join(pieces) == MIXED
    assert not any("\ufffd" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 20, "the text must come as it is made, not at the end"


@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_any_text_comes_back(tiny, demo, sentencepiece, text):
    for tokenizer in (tiny, demo, sentencepiece):
        ids = encode(tokenizer, text)
        pieces = pieces_of(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        if "\ufffd" not in tokenizer.decode(ids):  # the demo tokenizer has no token for a few bytes of unassigned planes
            assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=15))
def test_any_tokens_give_what_decode_gives(tiny, ids):
    """Random tokens hold broken characters; those show as U+FFFD, as in ``decode``."""
    assert "".join(pieces_of(tiny, ids)) == tiny.decode(ids)


def test_a_character_spread_over_tokens_comes_with_its_last(tiny):
    ids = encode(tiny, "👍")
    assert len(ids) == 4
    assert pieces_of(tiny, ids) == ["", "", "", "👍", ""]
    assert pieces_of(tiny, ids[:2]) == ["", "", "\ufffd"]


def test_special_tokens_give_no_text_and_do_not_pile_up(tiny):
    special = tiny.token_to_id(END_TURN)
    detokenizer = Detokenizer(tiny)
    assert [detokenizer.push(special) for _ in range(1000)] == [""] * 1000
    assert detokenizer.push(encode(tiny, "A")[0]) == "A"
    assert len(detokenizer._window) < 5


def test_endless_broken_bytes_are_shown_and_do_not_pile_up(tiny):
    lone = encode(tiny, "👍")[1]
    detokenizer = Detokenizer(tiny)
    shown = "".join(detokenizer.push(lone) for _ in range(200))
    assert 150 < len(shown) <= 200
    assert set(shown) == {"\ufffd"}
    assert len(detokenizer._window) < 50


def test_a_token_that_the_tokenizer_does_not_know_gives_no_text(tiny):
    assert pieces_of(tiny, [VOCAB_SIZE + 7, *encode(tiny, "ok")])[-2:] == ["k", ""]


def output_of(tokenizer, ids, stop):
    output, pieces = OutputText(tokenizer, stop), []
    for i in ids:
        piece = output.push(i)
        pieces.append(piece.text)
        if piece.stopped:
            return pieces, True
    pieces.append(output.flush())
    return pieces, output.stopped


def cut(text, stop):
    """The definition: the text before the stop string that is complete first."""
    ends = [(at + len(s), at) for s in stop if (at := text.find(s)) >= 0]
    return text[: min(ends)[1]] if ends else text


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", (" two",), "one"),
        ("one two three", ("nowhere",), "one two three"),
        ("stop at the start", ("stop",), ""),
        ("a\n\nb\n\n\nc", ("\n\n\n",), "a\n\nb"),
        ("aaab", ("aab",), "a"),
        ("xaby", ("ab", "xaby"), "x"),
        ("xab", ("ab", "xab"), ""),
        ("thumbs 👍👎 up", ("👎",), "thumbs 👍"),
        ("almost STO", ("STOP",), "almost STO"),
    ],
)
def test_the_text_ends_before_the_first_complete_stop_string(tiny, text, stop, expected):
    pieces, stopped = output_of(tiny, encode(tiny, text), stop)
    assert "".join(pieces) == expected
    assert stopped == (expected != text)


def test_nothing_of_a_stop_string_is_shown_ahead_of_time(tiny):
    output = OutputText(tiny, ("</answer>",))
    shown = "".join(output.push(i).text for i in encode(tiny, "x </answ"))
    assert shown == "x "
    assert output.flush() == "</answ"


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab<é👍\n", max_size=40), stop=st.lists(st.text("ab<é👍\n", min_size=1, max_size=4), max_size=3))
def test_any_split_gives_the_same_text(tiny, text, stop):
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    by_bytes = [tiny.token_to_id(byte) for byte in split.pre_tokenize_str(text)[0][0]] if text else []
    for ids in (encode(tiny, text), by_bytes):
        pieces, stopped = output_of(tiny, ids, tuple(stop))
        assert "".join(pieces) == cut(text, stop)
        assert stopped == (cut(text, stop) != text or any(s in text for s in stop))


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30), crash=st.integers(0, 30))
def test_pushing_the_log_again_gives_the_same_state(tiny, ids, crash):
    """What recovery does: a new object, fed with the tokens of the log, goes on as the old one would have."""
    stop = ("e ", "th")
    pieces, stopped = output_of(tiny, ids, stop)
    rebuilt = OutputText(tiny, stop)
    again = []
    for i in ids[: min(crash, len(pieces))]:
        if not rebuilt.stopped:
            again.append(rebuilt.push(i).text)
    assert again == pieces[: len(again)]
    for i in ids[len(again) :]:
        if not rebuilt.stopped:
            again.append(rebuilt.push(i).text)
    again.append(rebuilt.flush())
    assert "".join(again) == "".join(pieces)
    assert rebuilt.stopped == stopped


def test_misuse_is_refused(tiny):
    with pytest.raises(ValueError, match="empty"):
        OutputText(tiny, ("",))
    output = OutputText(tiny, ("a",))
    assert output.push(encode(tiny, "a")[0]) == Piece("", True)
    assert output.flush() == ""
    with pytest.raises(ValueError, match="stopped"):
        output.push(encode(tiny, "a")[0])
