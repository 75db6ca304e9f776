"""The last check at load: a short text through chunks, pages and row kernels gives the logits of the model's own eager
attention."""

import numpy as np
import torch

from engine import attention
from engine.errors import UnsupportedModel
from engine.model import LoadedModel
from engine.pools import DTYPES
from engine.runner import ModelRunner, Runner

# Both sides have one dtype and differ in the order of sums and roundings only. Measured over the supported architectures, worst
# difference against largest logit: float32 1e-5, float16 4e-3, bfloat16 3e-2; attention that is off by a twentieth shows at 4e-2
# to 1e-1, attention zeroed, halved or shifted at 4e-1 and more.
TOLERANCES = {"float32": 2e-3, "float16": 1.5e-2, "bfloat16": 1e-1}
_PAGE_SIZE = 4
_DEVICE_ROWS = 16


def compare_with_eager(model: LoadedModel, num_tokens: int) -> None:
    """Raise ``UnsupportedModel`` unless paged logits of ``num_tokens`` tokens match eager ones. Also compiles the kernels."""
    num_tokens = min(num_tokens, model.max_context)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, num_tokens)
    ours = _paged_logits(model, tokens)
    model.module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            ids = torch.from_numpy(tokens)[None].to(model.device)
            eager = model.module(input_ids=ids, use_cache=False).logits[0, -len(ours) :].float().cpu()
    finally:
        model.module.set_attn_implementation(attention.NAME)
    scale = float(eager.abs().max())
    worst = float((ours - eager).abs().max())
    if not worst <= TOLERANCES[model.dtype] * scale:  # NaN fails too
        raise UnsupportedModel(
            f"{model.architecture}: logits of a probe differ from eager attention by {worst:.3g} of {scale:.3g}",
            "the model needs something of its attention that we do not do",
            name=model.architecture,
            field="logits",
        )


def _paged_logits(model: LoadedModel, tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> torch.Tensor:
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
        pages = torch.zeros(-(-num_tokens // _PAGE_SIZE), *model.geometry(_PAGE_SIZE).page_shape)
        return ModelRunner(model, pages, _PAGE_SIZE, num_tokens)
    from engine.cuda_device import PAGE_STEP
    from engine.cuda_rows import eager
    from engine.cuda_runner import CudaRunner

    shape = (-(-num_tokens // PAGE_STEP), *model.geometry(PAGE_STEP).page_shape)
    pages = torch.zeros(shape, dtype=DTYPES[model.dtype], device=model.device)
    return CudaRunner(model, pages, PAGE_STEP, num_tokens, buckets=(_DEVICE_ROWS,), launcher=eager)
