"""From logits to a token: a pure function of (logits, parameters, seed, token index). Free of torch.

Random numbers are counter-based (Philox, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): token i of a
job always gets the same one, so there is no generator state to save, and nothing to re-make wrongly after a crash or a
preemption. Arithmetic is float64 and per row.

The filters mean what they mean in vLLM and in Hugging Face transformers: repetition penalty (Keskar et al. 2019,
arXiv:1909.05858) over prompt and output, presence and frequency penalties (as the OpenAI API documents them) over the output,
top_k keeps ties of the k-th, top_p (Holtzman et al. 2020, arXiv:1904.09751) keeps the smallest set that reaches p, min_p
(Nguyen et al. 2024, arXiv:2407.01082) is relative to the likeliest token.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.errors import InvalidLogits, InvalidSampling

MAX_LOGPROBS = 20
_F64 = npt.NDArray[np.float64]
_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a job's tokens are chosen. Raises ``InvalidSampling`` naming the field for whatever is out of range, NaN included.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 filter nothing; ``repetition_penalty`` 1 and the other
    penalties 0 change nothing. ``min_tokens``: end-of-text tokens are not chosen before so many tokens. ``logprobs``: how many
    alternatives to report; None reports nothing.
    """

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_int("seed", self.seed, 0, 2**64 - 1)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_float("temperature", self.temperature, 0.0, 1e4)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_below=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias", token, 0, 2**31 - 1)
            _check_float("logit_bias", bias, -100.0, 100.0)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True)
class Sampled:
    """The chosen token. ``logprob`` and ``top`` (likeliest first, lower id first among equals) are natural logarithms of the
    model's own distribution, before any parameter changed it; None and empty unless asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(
    logits: npt.NDArray[np.float32],
    params: SamplingParams,
    token_index: int,
    prompt_ids: Sequence[int] | _Ids,
    generated_ids: Sequence[int] | _Ids,
    suppress: Collection[int] = (),
) -> Sampled:
    """Choose token number ``token_index`` (from 0) of a job's output from ``logits`` [vocab].

    ``suppress`` are the ids not to be chosen while ``token_index < params.min_tokens``. Raises ``InvalidLogits`` when the
    logits hold NaN or +inf, or leave nothing to choose.
    """
    scores: npt.NDArray[np.floating] = logits
    if params.has_penalties:
        scores = _penalise(logits.astype(np.float64), params, np.asarray(prompt_ids, np.int64), np.asarray(generated_ids, np.int64))
    if params.logit_bias or (suppress and token_index < params.min_tokens):
        scores = scores.astype(np.float64)
        for token, bias in params.logit_bias.items():
            if token < len(scores):
                scores[token] += bias
        if token_index < params.min_tokens:
            scores[list(suppress)] = -np.inf
    best = int(np.argmax(scores))  # the lowest id among equals; NaN counts as the largest
    if not math.isfinite(scores[best]):
        raise InvalidLogits("the model gave logits without a finite maximum", "check the weights")
    token = best if params.temperature == 0.0 else _draw(scores, params, token_index)
    if params.logprobs is None:
        return Sampled(token)
    return _with_logprobs(logits, token, params.logprobs)


def uniform(seed: int, token_index: int) -> float:
    """The random number in [0, 1) of one token: the top 53 bits of Philox-4x64's first word for key ``seed``, counter
    ``token_index``."""
    word = np.random.Philox(key=seed, counter=token_index).random_raw()
    return float(int(word) >> 11) * 2.0**-53


def _penalise(scores: _F64, params: SamplingParams, prompt: _Ids, generated: _Ids) -> _F64:
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate((prompt, generated)))
        values = scores[seen]
        scores[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if len(generated):
        tokens, counts = np.unique(generated, return_counts=True)
        scores[tokens] -= params.frequency_penalty * counts + params.presence_penalty
    return scores


def _draw(scores: npt.NDArray[np.floating], params: SamplingParams, token_index: int) -> int:
    """Inverse transform sampling over the tokens that the filters leave, in the order of their ids."""
    tokens = _top_k(scores, params.top_k) if 0 < params.top_k < len(scores) else None
    kept = scores if tokens is None else scores[tokens]
    shifted = kept.astype(np.float64)
    shifted -= shifted.max()
    shifted /= params.temperature
    weights = np.exp(shifted)
    chosen = _top_p(weights, params.top_p) if params.top_p < 1.0 else None
    if params.min_p > 0.0:
        # Relative to the likeliest, whose weight is 1 here.
        likely = np.flatnonzero(weights >= params.min_p) if chosen is None else chosen[weights[chosen] >= params.min_p]
        chosen = likely
    if chosen is not None:
        weights = weights[chosen]
        tokens = chosen if tokens is None else tokens[chosen]
    # cumsum adds one after another: unlike sum, its bits cannot depend on how the work is split.
    cumulated = np.cumsum(weights)
    total = cumulated[-1]
    at = min(uniform(params.seed, token_index) * total, np.nextafter(total, 0.0))
    index = int(np.searchsorted(cumulated, at, side="right"))
    return index if tokens is None else int(tokens[index])


def _top_k(scores: npt.NDArray[np.floating], k: int) -> _Ids:
    """Ids, ascending, of the k highest scores and of all that equal the k-th."""
    threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
    return np.flatnonzero(scores >= threshold)


def _top_p(weights: _F64, p: float) -> _Ids:
    """Indices, ascending, of the smallest set of largest weights that holds at least ``p`` of the sum; lower index first among
    equals.

    Sorting 49k weights costs 5 ms. But weights below (1 - p) / n of the sum come to less than 1 - p of it together, so the set lies
    among the others, which are mostly few.
    """
    total = np.cumsum(weights)[-1]
    candidates = np.flatnonzero(weights >= (1.0 - p) * total / len(weights))
    ordered = candidates[np.argsort(-weights[candidates], kind="stable")]
    count = int(np.searchsorted(np.cumsum(weights[ordered]), p * total, side="left")) + 1
    return np.sort(ordered[:count])


def _with_logprobs(logits: npt.NDArray[np.float32], token: int, count: int) -> Sampled:
    values = logits.astype(np.float64)
    shift = values.max()
    normaliser = shift + math.log(np.cumsum(np.exp(values - shift))[-1])
    top: tuple[tuple[int, float], ...] = ()
    if count:
        ids = _top_k(values, min(count, len(values)))
        ordered = ids[np.argsort(-values[ids], kind="stable")][:count]
        top = tuple((int(i), float(values[i] - normaliser)) for i in ordered)
    return Sampled(token, float(values[token] - normaliser), top)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise InvalidSampling(name, f"must be an integer, not {value!r}")
    if not low <= value <= high:
        raise InvalidSampling(name, f"must be between {low} and {high}, not {value}")


def _check_float(name: str, value: object, low: float, high: float, *, open_below: bool = False) -> None:
    if not isinstance(value, int | float | np.floating) or isinstance(value, bool):
        raise InvalidSampling(name, f"must be a number, not {value!r}")
    if not low <= value <= high or (open_below and value == low):  # NaN fails every comparison
        raise InvalidSampling(name, f"must be {'above' if open_below else 'at least'} {low:g} and at most {high:g}, not {value}")
