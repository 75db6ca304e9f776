"""The bytes that a token stands for: of a character's first half, too, which is no text."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"  #: how SentencePiece writes a space


def bytes_of_tokens(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """A function from token ids, by the way that the tokenizer's own decoder writes bytes."""
    kinds = frozenset(_kinds(json.loads(tokenizer.to_str())["decoder"]))
    added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
    byte_of = {char: value for value, char in _byte_alphabet().items()}

    def bytes_of(token: int) -> bytes:
        piece = added.get(token)
        if piece is not None:
            return piece.encode()
        piece = tokenizer.id_to_token(token)
        if piece is None:  # a row of the embedding without a token
            return b""
        if "ByteLevel" in kinds and all(char in byte_of for char in piece):
            return bytes(byte_of[char] for char in piece)
        if "ByteFallback" in kinds and (found := _BYTE.fullmatch(piece)):
            return bytes([int(found[1], 16)])
        if kinds & {"Metaspace", "Replace", "ByteFallback"}:
            return piece.replace(_SPACE, " ").encode()
        return str(tokenizer.decode([token], skip_special_tokens=False)).encode()

    return bytes_of


def _kinds(decoder: dict[str, Any] | None) -> Iterator[str]:
    if decoder is not None:
        yield decoder["type"]
        for inner in decoder.get("decoders", ()):
            yield from _kinds(inner)


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's: each byte as a printable character; those that are none as the characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
