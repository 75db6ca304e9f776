"""From logits to tokens: each a pure function of its row's logits and its ``Draw``; of nothing else, so that its bits are the
same in any company. The work is done by ``kernels/sampling.py``.

Random numbers are counter-based (Philox, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): token i of a
job always gets the same one, so there is no generator state to save, and nothing to re-make wrongly after a crash or a
preemption.

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
_NO_MASKS = np.empty((0, 0), np.int32)
Ids = Sequence[int] | npt.NDArray[np.integer]


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


@dataclass(frozen=True, slots=True)
class Draw:
    """What a row's token depends on beside its logits: it is number ``token_index`` (from 0) of its job's output.

    Only penalties look at the ids of prompt and output; arrays of int32 are taken as they are. ``suppress`` are the ids not to be
    chosen while ``token_index < params.min_tokens``. Of ``allowed`` (bit i % 32 of word i // 32 is token i's) the ids without a bit
    are not chosen, whatever else is asked for; None allows all.
    """

    params: SamplingParams
    token_index: int
    prompt_ids: Ids = ()
    generated_ids: Ids = ()
    suppress: Collection[int] = ()
    allowed: npt.NDArray[np.int32] | None = None


def sample_rows(logits: npt.NDArray[np.float32], draws: Sequence[Draw], threads: int = 1) -> list[Sampled | InvalidLogits]:
    """Choose a token for each row of ``logits`` [len(draws), vocab].

    A row whose logits hold NaN or +inf, or leave nothing to choose, has an error in its place; the others have their tokens.
    """
    # Whoever imports this file for its parameters (the api does) has no use for numba, nor for torch, which comes with it.
    from engine.kernels import sampling

    history: list[Ids] = []
    biases: list[tuple[int, float]] = []
    masks: list[npt.NDArray[np.int32]] = []
    requests = np.empty(len(draws), sampling.REQUEST)
    history_to = 0
    for row, draw in enumerate(draws):
        params = draw.params
        history_from = generated_from = history_to
        if params.has_penalties:
            history += (draw.prompt_ids, draw.generated_ids)
            generated_from += len(draw.prompt_ids)
            history_to = generated_from + len(draw.generated_ids)
        bias_from = len(biases)
        biases += params.logit_bias.items()
        if draw.token_index < params.min_tokens:
            biases += [(token, -math.inf) for token in draw.suppress]
        mask = sampling.NO_MASK
        if draw.allowed is not None:
            mask = len(masks)
            masks.append(draw.allowed)
        requests[row] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.seed,
            draw.token_index,
            params.top_k,
            sampling.NO_LOGPROBS if params.logprobs is None else params.logprobs,
            history_from,
            generated_from,
            history_to,
            bias_from,
            len(biases),
            mask,
        )
    wanted = min(max((draw.params.logprobs or 0 for draw in draws), default=0), logits.shape[1])
    tokens, logprobs = np.empty(len(draws), np.int64), np.empty(len(draws))
    top_ids, top_logprobs = np.empty((len(draws), wanted), np.int64), np.empty((len(draws), wanted))
    sampling.choose_rows(
        np.require(logits, np.float32, ["C", "W"]),  # nothing writes to them, but the kernel is compiled for one layout
        requests,
        np.concatenate([np.empty(0, np.int32), *(np.asarray(ids, np.int32) for ids in history)]),
        np.array([token for token, _ in biases], np.int32),
        np.array([bias for _, bias in biases], np.float64),
        np.stack(masks) if masks else _NO_MASKS,
        tokens,
        logprobs,
        top_ids,
        top_logprobs,
        threads,
    )
    results: list[Sampled | InvalidLogits] = []
    for row, (draw, token) in enumerate(zip(draws, tokens.tolist(), strict=True)):
        count = draw.params.logprobs
        if token == sampling.INVALID:
            results.append(InvalidLogits("the model gave logits without a finite maximum", "check the weights"))
        elif count is None:
            results.append(Sampled(token))
        else:
            top = zip(top_ids[row, :count].tolist(), top_logprobs[row, :count].tolist(), strict=True)
            results.append(Sampled(token, float(logprobs[row]), tuple(top)))
    return results


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
