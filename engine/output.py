"""The text a client sees: detokenised, and cut at a stop string."""

from dataclasses import dataclass

from tokenizers import Tokenizer

from engine.detokenizer import Detokenizer


@dataclass(frozen=True)
class Piece:
    """What becomes visible with one token. ``stopped``: a stop string was completed; the text ends before it."""

    text: str
    stopped: bool


class OutputText:
    """Text of one job's output, piece by piece: a pure function of (tokens, stop strings, tokenizer), so it is rebuilt by
    pushing the log again.

    Text that may turn out to begin a stop string is held back. The stop string that is complete first wins (of those complete
    at the same character, the longest), however the text is spread over tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        """Raises ``ValueError`` for an empty stop string."""
        if "" in stop:
            raise ValueError("a stop string must not be empty")
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = stop
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> Piece:
        """Add one token. Raises ``ValueError`` after the text has stopped."""
        return self._add(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """The text still held, when the output ends for another reason; a stop string completed by it cuts it too."""
        if self.stopped:
            return ""
        text = self._add(self._detokenizer.flush()).text
        if self.stopped:
            return text
        text, self._held = text + self._held, ""
        return text

    def _add(self, text: str) -> Piece:
        if self.stopped:
            raise ValueError("the text has stopped already")
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return Piece(text[: min(found)[1]], True)
        keep = len(text) - self._may_begin_stop(text)
        self._held = text[keep:]
        return Piece(text[:keep], False)

    def _may_begin_stop(self, text: str) -> int:
        """Length of the longest end of ``text`` that is the beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
