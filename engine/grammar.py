"""What a grammar allows a job to say next: a pure function of (grammar, tokens, tokenizer), so it is rebuilt by pushing the log
again. llguidance does the work: Earley's algorithm (CACM 1970) over a lexer of regular-expression derivatives.

Everything here is synchronous and free of torch: the api asks the very same code whether an engine will take a grammar.
"""

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance import numpy as bitmasks
from tokenizers import Tokenizer

from engine.errors import GrammarFailed

Mask = npt.NDArray[np.int32]  #: bit i % 32 of word i // 32: whether token i may come next

#: What one grammar may cost: some 20 ms to compile and, with 2 KB for each state of its lexer, 100 MB. Items in a row are what an
#: ambiguous grammar has ever more of: with 2,000 the worst that we found took 0.9 s for a token, with 1,000 it takes 0.15 s. An
#: object of 240 names that may be missing has 1,000, too.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=1_000,
    max_lexer_states=50_000,
    verbose_errors=False,  # those hold the grammar, which is a client's own words
)
_COMPILED = 16  #: grammars kept as compiled: jobs of one schema come together, and so do the choices of one request
_SHOWN = 300  #: characters of llguidance's words
_NO_END = "<|no end of text|>"


@dataclass(slots=True, eq=False)
class GrammarState:
    """Where one Sequence is in its grammar. Belongs to the ``Grammars`` that began it."""

    matcher: LLMatcher
    allowed: Mask
    ended: bool = False  #: nothing but the end may follow
    problem: str = ""  #: why there is no right token any more


class Grammars:
    """All grammars over one model's tokens. ``end_ids``: its end-of-text tokens, of which it may have none."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int], *, threads: int = 1) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)
        self._executor = LLExecutor(threads)
        self._compiled = functools.lru_cache(_COMPILED)(self._compile)

    def begin(self, grammar: str, tokens: Sequence[int] = ()) -> GrammarState:
        """The state behind ``tokens``. Raises ``GrammarFailed``, too where nothing may follow them.

        Every mask is computed again, though only the last is of use: what llguidance's limits count depends on the masks before,
        so a rebuilt state does what the live one did, call by call (13 µs a token).
        """
        first = self._compiled(grammar)
        state = GrammarState(first.matcher.deep_copy(), first.allowed, first.ended)
        for index, token in enumerate(tokens):
            self.push([(state, token)])
            if state.problem:
                raise GrammarFailed(f"it does not go on with token {index} of the log ({token}): {state.problem}")
        if state.ended:
            raise GrammarFailed("nothing may follow the tokens of the log" if tokens else "it allows no text but the empty one")
        return state

    def push(self, chosen: Sequence[tuple[GrammarState, int]]) -> None:
        """Move each state on by its token. One that has no way on gets a ``problem``, and no other feels it."""
        for state, token in chosen:
            state.matcher.consume_token(token)
        self._look([state for state, _ in chosen])

    def _look(self, states: Sequence[GrammarState]) -> None:
        """Compute what may come next: the masks of all, in parallel."""
        masks = bitmasks.allocate_token_bitmask(len(states), self._tokens.vocab_size)
        bitmasks.fill_next_token_bitmask_par(self._executor, [(state.matcher, i) for i, state in enumerate(states)], masks)
        for state, mask in zip(states, masks, strict=True):
            state.allowed = mask & self._known
            over = not (mask & self._text).any()
            if state.matcher.is_error():
                state.problem = _shortened(state.matcher.get_error())
            elif over and not state.matcher.is_accepting():
                state.problem = "no token of this model goes on from here"
            else:
                state.ended = over

    def _compile(self, grammar: str) -> GrammarState:
        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarFailed(_shortened(matcher.get_error()))
        state = GrammarState(matcher, np.empty(0, np.int32))
        self._look([state])
        if state.problem:
            raise GrammarFailed(state.problem)
        return state

    @functools.cached_property
    def _tokens(self) -> LLTokenizer:
        """Made for the first grammar (0.2 s for 49,152 tokens): most servers never see one."""
        tokenizer, ends = self._tokenizer, [token for token in self._end_ids if token < self._tokenizer.get_vocab_size()]
        if not ends:
            # llguidance needs an end, and would take any token that looks like one: it gets one that no model gives.
            tokenizer = Tokenizer.from_str(tokenizer.to_str())
            tokenizer.add_special_tokens([_NO_END])
            end = tokenizer.token_to_id(_NO_END)
            assert end is not None
            ends = [end]
        try:
            return LLTokenizer(tokenizer.to_str(), n_vocab=max(self._vocab_size, tokenizer.get_vocab_size()), eos_token=ends)
        except ValueError as error:
            raise GrammarFailed(f"the tokenizer of this model serves no grammars: {error}") from error

    @functools.cached_property
    def _known(self) -> Mask:
        """The tokens that the model can give."""
        return self._mask_of(range(self._vocab_size))

    @functools.cached_property
    def _text(self) -> Mask:
        """Those that do not end the text."""
        return self._mask_of(set(range(self._vocab_size)).difference(self._end_ids))

    def _mask_of(self, ids: Collection[int]) -> Mask:
        bits = np.zeros(bitmasks.get_bitmask_shape(1, self._tokens.vocab_size)[1] * 32, np.uint8)
        bits[list(ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


def _shortened(error: str) -> str:
    """In one line. Words of its own for a dead end, which llguidance reports with the name of a state."""
    if error.startswith("NoExtensionBias"):
        return "no text satisfies it"
    return " ".join(error.removesuffix("<non-verbose/>").split())[:_SHOWN]
