"""Which modules give a row other bits in company: asked only when the self-test found that rows differ."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from engine.calls import RowsCall
from engine.exactness import ROWS, Trial
from engine.pools import kernel_array
from engine.rowwise import functional_rows


def differing_layers(trial: Trial) -> list[str]:
    """Each kind of innermost layer on the path, called again with one row of what it was called with."""
    model = trial.runner.model
    seen: dict[tuple[Any, ...], tuple[str, Any, tuple[Any, ...], dict[str, Any], Any]] = {}

    def record(name: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            key = (
                type(module),
                *(tuple(a.shape) for a in args if isinstance(a, torch.Tensor)),
                getattr(module, "out_features", None),
            )
            seen.setdefault(key, (name, module, args, kwargs, output))

        return hook

    leaves = [(name, part) for name, part in model.module.named_modules() if not any(True for _ in part.children())]
    handles = [part.register_forward_hook(record(name), with_kwargs=True) for name, part in leaves]
    trial.run(np.arange(ROWS), 0, 1)
    for handle in handles:
        handle.remove()
    problems = []
    with _rows_call(trial):
        for name, module, args, kwargs, output in seen.values():
            for row in range(ROWS):
                alone = module(*(_only(a, row) for a in args), **{key: _only(a, row) for key, a in kwargs.items()})
                if not _equal(alone, output, row):
                    problems.append(f"{type(module).__name__} {name}: a row alone and among {ROWS} differ")
                    break
    return problems


@contextmanager
def _rows_call(trial: Trial) -> Iterator[None]:
    model, zeros = trial.runner.model, np.zeros(1, np.int32)
    with model.lock, torch.inference_mode(), functional_rows(model.functional_rows):
        model.slot.call = RowsCall(kernel_array(trial.pool), trial.tables, zeros, zeros, model.threads)
        try:
            yield
        finally:
            model.slot.call = None


def _only(value: Any, row: int) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[:2] == (1, ROWS):
        return value[:, row : row + 1]
    return value[row : row + 1] if isinstance(value, torch.Tensor) and value.shape[:1] == (ROWS,) else value


def _equal(alone: Any, together: Any, row: int) -> bool:
    if isinstance(alone, tuple | list):
        return all(_equal(a, b, row) for a, b in zip(alone, together, strict=True))
    return not isinstance(alone, torch.Tensor) or torch.equal(alone, _only(together, row))
