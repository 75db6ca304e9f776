"""The last check at load: a short text through chunks, pages and row kernels gives the logits of the model's own eager
attention."""

from typing import Any

import numpy as np
import torch

from engine import attention
from engine.errors import UnsupportedModel
from engine.model import LoadedModel
from engine.pools import DTYPES
from engine.runner import Runner, make_runner

# Both sides have the same weights and differ in the order of sums and in roundings only, those of pages included. Measured over
# the supported architectures, worst difference against largest logit: float32 1e-5, float16 4e-3, bfloat16 3e-2; attention that
# is off by a twentieth shows at 4e-2 to 1e-1, attention zeroed, halved or shifted at 4e-1 and more.
TOLERANCES = {"float32": 2e-3, "float16": 1.5e-2, "bfloat16": 1e-1}
_NUM_TOKENS = 24
_PAGE_SIZE = 4
_DEVICE_ROWS = 16
_Tokens = np.ndarray[tuple[int], np.dtype[np.int64]]


def probe_tokens(max_context: int, vocab_size: int) -> _Tokens:
    return np.random.default_rng(0).integers(0, vocab_size, min(_NUM_TOKENS, max_context))


def eager_logits(module: Any, tokens: _Tokens) -> torch.Tensor:
    """float32 [tokens, vocab]: what transformers' own attention makes of ``tokens``."""
    module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            ids = torch.from_numpy(tokens)[None].to(module.device)
            logits: torch.Tensor = module(input_ids=ids, use_cache=False).logits[0].float().cpu()
    finally:
        module.set_attn_implementation(attention.NAME)
    return logits


def refuse_difference(model: LoadedModel, tokens: _Tokens, expected: torch.Tensor) -> None:
    """Raise ``UnsupportedModel`` unless our logits of ``tokens`` match the ``expected`` ones. Also compiles the kernels."""
    ours = _paged_logits(model, tokens)
    expected = expected[-len(ours) :]
    scale = float(expected.abs().max())
    worst = float((ours - expected).abs().max())
    if not worst <= TOLERANCES[model.kv_dtype] * scale:  # NaN fails too
        raise UnsupportedModel(
            f"{model.architecture}: logits of a probe differ from eager attention by {worst:.3g} of {scale:.3g}",
            "the model needs something of its attention that we do not do",
            name=model.architecture,
            field="logits",
        )


def _paged_logits(model: LoadedModel, tokens: _Tokens) -> torch.Tensor:
    """Logits of the last rows: two chunks, then a replay of several rows in one call, then one row alone."""
    runner = _new_runner(model, len(tokens))
    table = np.arange(len(runner.pool), dtype=np.int32)[::-1].copy()
    first, second, last = len(tokens) // 3, len(tokens) // 2, len(tokens) - 1
    runner.run_chunk(tokens[:first], 0, table, 0, False)
    chunk = runner.run_chunk(tokens[first:second], first, table, first, True)
    assert chunk is not None
    logits = [chunk[None]]
    for start, end in ((second, last), (last, len(tokens))):
        rows = np.arange(end - start, dtype=np.int32)
        logits.append(runner.run_rows(tokens[start:end], start + rows, table[None], np.zeros_like(rows), rows))
    return torch.cat(logits)


def _new_runner(model: LoadedModel, num_tokens: int) -> Runner:
    """A runner over pages of its own for ``num_tokens`` positions. On a device without graphs: it is used three times."""
    if model.device == "cpu":
        shape = (-(-num_tokens // _PAGE_SIZE), *model.geometry(_PAGE_SIZE).page_shape)
        return make_runner(model, torch.zeros(shape, dtype=DTYPES[model.kv_dtype]), _PAGE_SIZE, num_tokens)
    from engine.cuda_device import PAGE_STEP
    from engine.cuda_rows import eager
    from engine.cuda_runner import CudaRunner

    shape = (-(-num_tokens // PAGE_STEP), *model.geometry(PAGE_STEP).page_shape)
    pages = torch.zeros(shape, dtype=DTYPES[model.kv_dtype], device=model.device)
    return CudaRunner(model, pages, PAGE_STEP, num_tokens, buckets=(_DEVICE_ROWS,), launcher=eager)
