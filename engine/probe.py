"""The last check at load: a short text through chunks, pages and row kernels gives the logits of the model's own eager
attention."""

import numpy as np
import torch

from engine import attention
from engine.errors import UnsupportedModel
from engine.model import LoadedModel
from engine.runner import ModelRunner

# Both sides are float32 and differ in the order of sums only (1e-5 relative, measured); a forgotten argument shows at 1e-2 and
# more.
TOLERANCE = 2e-3
_PAGE_SIZE = 4


def compare_with_eager(model: LoadedModel, num_tokens: int) -> None:
    """Raise ``UnsupportedModel`` unless paged logits of ``num_tokens`` tokens match eager ones. Also compiles the kernels."""
    num_tokens = min(num_tokens, model.max_context)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, num_tokens)
    ours = _paged_logits(model, tokens)
    model.module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            eager = model.module(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0, -len(ours) :]
    finally:
        model.module.set_attn_implementation(attention.NAME)
    scale = float(eager.abs().max())
    worst = float((ours - eager).abs().max())
    if not worst <= TOLERANCE * scale:  # NaN fails too
        raise UnsupportedModel(
            f"{model.architecture}: logits of a probe differ from eager attention by {worst:.3g} of {scale:.3g}",
            "the model needs something of its attention that we do not do",
            name=model.architecture,
            field="logits",
        )


def _paged_logits(model: LoadedModel, tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> torch.Tensor:
    """Logits of the last rows: two chunks, then a replay of several rows in one call, then one row alone."""
    num_pages = -(-len(tokens) // _PAGE_SIZE)
    pool = torch.zeros(num_pages, *model.geometry(_PAGE_SIZE).page_shape)
    table = np.arange(num_pages, dtype=np.int32)[::-1].copy()
    first, second, last = len(tokens) // 3, len(tokens) // 2, len(tokens) - 1
    runner = ModelRunner(model, pool, _PAGE_SIZE, len(tokens))
    runner.run_chunk(tokens[:first], 0, table, 0, False)
    chunk = runner.run_chunk(tokens[first:second], first, table, first, True)
    assert chunk is not None
    logits = [chunk[None]]
    for start, end in ((second, last), (last, len(tokens))):
        rows = np.arange(end - start, dtype=np.int32)
        logits.append(runner.run_rows(tokens[start:end], start + rows, table[None], np.zeros_like(rows), rows))
    return torch.cat(logits)
