"""Layers that give a generated row the same bits whatever rows it is computed with.

Linear layers do so in every call; the rest of a prompt chunk goes through torch as usual, since its shapes depend on its own job
alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import activations
from transformers.pytorch_utils import Conv1D

from engine.calls import CallSlot, RowsCall
from engine.kernels.activation import GELU, GELU_TANH, SILU, activate_rows
from engine.kernels.panels import linear_panels, pack_new

_NO_BIAS = np.empty(0, np.float32)
_ACTIVATION_KINDS: dict[type, int] = {
    nn.SiLU: SILU,
    activations.SiLUActivation: SILU,
    activations.GELUActivation: GELU,
    activations.GELUTanh: GELU_TANH,
    activations.NewGELUActivation: GELU_TANH,
    activations.AccurateGELUActivation: GELU_TANH,
    activations.FastGELUActivation: GELU_TANH,
}
# Exact whatever stands beside them: comparisons and single IEEE operations, no polynomial with another form for the remainder
# of a vector.
_EXACT_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, activations.LinearActivation, activations.ReLUSquaredActivation)


def row_linear(x: torch.Tensor, panels: np.ndarray[Any, Any], scale: Any, bias: Any, outputs: int, threads: int) -> torch.Tensor:
    """``x`` [..., in] float32 through the row kernel: [..., outputs]."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y = torch.empty(rows.shape[0], outputs)
    if rows.shape[0]:
        linear_panels(rows.numpy(), panels, scale, bias, y.numpy(), threads)
    return y.view(*x.shape[:-1], outputs)


def row_activation(x: torch.Tensor, kind: int, threads: int) -> torch.Tensor:
    """SiLU or GELU through our kernel; any shape, float32."""
    x = x.contiguous()
    y = torch.empty_like(x)
    activate_rows(x.view(-1).numpy(), y.view(-1).numpy(), kind, threads)
    return y


def one_by_one(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """``function`` on each row by itself: slow, but the call's shape is then always the same."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return torch.stack([function(row) for row in rows.unbind(0)]).view_as(x) if rows.shape[0] else function(x)


class RowLinear(nn.Module):
    """Takes the place of ``nn.Linear`` and of ``Conv1D``, in every call; keeps the weights as panels only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, weights: str, slot: CallSlot) -> None:
        """``weight`` [out, in]; ``weights``: the number format, one of ``panels.FORMATS``."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._slot = slot
        self._panels, self._scale = pack_new(weight.detach().float().contiguous().numpy(), weights, slot.threads)
        self._bias = _NO_BIAS if bias is None else bias.detach().numpy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return row_linear(x, self._panels, self._scale, self._bias, self.out_features, self._slot.threads)


class RowActivation(nn.Module):
    """Takes the place of an activation whose torch form depends on a row's neighbours."""

    def __init__(self, original: nn.Module, slot: CallSlot) -> None:
        super().__init__()
        self.original, self._slot = original, slot
        self._kind = _ACTIVATION_KINDS.get(type(original))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(self._slot.call) is not RowsCall:
            result: torch.Tensor = self.original(x)
            return result
        if self._kind is not None:
            return row_activation(x, self._kind, self._slot.threads)
        return one_by_one(self.original, x)


def make_rowwise(model: Any, slot: CallSlot, weights: str) -> None:
    """Replace the linear layers and activations of ``model`` in place."""
    known_activations = {entry[0] if isinstance(entry, tuple) else entry for entry in activations.ACT2CLS.values()}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, RowLinear(child.weight, child.bias, weights, slot))
            elif isinstance(child, Conv1D):
                setattr(parent, name, RowLinear(child.weight.t(), child.bias, weights, slot))
            elif type(child) in known_activations and not isinstance(child, _EXACT_ACTIVATIONS):
                setattr(parent, name, RowActivation(child, slot))


class FunctionalRows(TorchFunctionMode):
    """Catches row-dependent functions that a model calls by itself (the experts and routers of a mixture, gates), during a rows
    call.

    ``caught`` names them: a model for which it stays empty at load runs without this mode and its cost of a microsecond or two
    per call.
    """

    def __init__(self, threads: int, weights: str) -> None:
        super().__init__()
        self.threads = threads
        self.weights = weights
        self.caught: set[str] = set()
        self._packed: dict[tuple[Any, ...], tuple[torch.Tensor, np.ndarray[Any, Any], Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = _ROW_DEPENDENT.get(func)
        if name is None:
            return func(*args, **kwargs)
        self.caught.add(name)
        if name == "linear":
            return self._linear(*args, **kwargs)
        x, *rest = args if args else (kwargs.pop("input"),)
        kwargs.pop("inplace", None)
        if name == "silu":
            return row_activation(x, SILU, self.threads)
        if name == "gelu":
            return row_activation(
                x, GELU_TANH if (rest[0] if rest else kwargs.get("approximate", "none")) == "tanh" else GELU, self.threads
            )
        return one_by_one(lambda row: func(row, *rest, **kwargs), x)

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        key = (weight.data_ptr(), weight.shape, weight.stride())
        if key not in self._packed:
            panels, scale = pack_new(weight.detach().float().contiguous().numpy(), self.weights, self.threads)
            self._packed[key] = weight, panels, scale  # the weight, so that its address stays its own
        _, panels, scale = self._packed[key]
        bias_array = _NO_BIAS if bias is None else bias.detach().contiguous().numpy()
        return row_linear(input, panels, scale, bias_array, len(weight), self.threads)


_ROW_DEPENDENT: dict[Any, str] = {
    F.linear: "linear",
    F.silu: "silu",
    F.gelu: "gelu",
    torch.sigmoid: "sigmoid",
    torch.Tensor.sigmoid: "sigmoid",
    F.sigmoid: "sigmoid",
    F.softplus: "softplus",
    F.mish: "mish",
    torch.tanh: "tanh",
    torch.Tensor.tanh: "tanh",
}


@contextmanager
def functional_rows(mode: FunctionalRows | None) -> Iterator[None]:
    """Run with ``mode`` where the model needs it."""
    if mode is None:
        yield
    else:
        with mode:
            yield
