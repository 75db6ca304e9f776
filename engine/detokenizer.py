"""Tokens to text, as they come, never splitting a character."""

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
# A character is at most four bytes and a byte at most one token, so a longer run of tokens that ends in no text never will be
# text.
_LONGEST_RUN = 16


class Detokenizer:
    """Incremental decoding; special tokens give no text. A pure function of the tokens pushed.

    A token's text depends on its neighbours (a space before a word, bytes of one character spread over tokens), so a window of
    the last tokens is decoded with and without the new one and the difference is the new text (the scheme of Hugging Face's
    text-generation-inference). The concatenation of all pieces and of ``flush`` is ``tokenizer.decode`` of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._window: list[int] = []
        self._num_shown = 0
        self._shown = ""  # text of the tokens window[:num_shown], all of it given out

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while it ends amid a character."""
        if token_id in self._special:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) <= len(self._shown) or text.endswith(_REPLACEMENT):
            return self.flush() if len(self._window) - self._num_shown >= _LONGEST_RUN else ""
        return self._show(text)

    def flush(self) -> str:
        """What is still held: an unfinished character shows as U+FFFD, as in ``tokenizer.decode``."""
        return self._show(self._decode(self._window))

    def _show(self, text: str) -> str:
        piece = text[len(self._shown) :]
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        self._shown = self._decode(self._window)
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
