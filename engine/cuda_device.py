"""What our arithmetic demands of a CUDA device, how it is set up, and which facts of it change bits.

The demands are those of the FlashAttention-2 that torch carries, found in its sources (``aten/.../flash_attn/flash_api.cpp``,
``mha_varlen_fwd``): float16 or bfloat16, compute capability 8.0, head dims that are multiples of 8 up to 256
(``model_support``), pages whose size is a multiple of 256. Strides are free but for the last dimension, so a layer of a
page-major pool is read where it is.
"""

import os
from importlib.metadata import distributions
from typing import Any

import torch

from engine.errors import InvalidCall, UnsupportedModel

PAGE_STEP = 256
_DTYPES = ("bfloat16", "float16")
_CAPABILITY = (8, 0)
# They choose other code paths inside cuBLAS and torch.
_ENVIRONMENT = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT")


def check_device(device: str, dtype: str) -> None:
    """Raise ``UnsupportedModel`` unless models can be served on ``device`` in ``dtype``."""
    if torch.device(device).type != "cuda":
        raise UnsupportedModel(f"device {device} is not supported", "use cpu, cuda or cuda:N", field="device")
    if dtype not in _DTYPES:
        raise UnsupportedModel(
            f"dtype {dtype} is not supported on {device}: its flash attention takes {' or '.join(_DTYPES)}",
            "use bfloat16, or the cpu",
            field="dtype",
        )
    if not torch.cuda.is_available():
        raise UnsupportedModel(
            f"device {device} was asked for, and torch {torch.__version__} sees no CUDA device",
            "use the cpu, or install a CUDA build of torch and the driver",
            field="device",
        )
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        raise UnsupportedModel(f"there is no {device}: torch sees {torch.cuda.device_count()}", "count from 0", field="device")
    if (capability := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        raise UnsupportedModel(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, and flash attention "
            f"needs {_CAPABILITY[0]}.{_CAPABILITY[1]} (Ampere)",
            "use the cpu",
            field="device",
        )


def check_page_size(page_size: int) -> None:
    """Raise ``InvalidCall`` for pages that attention on a device does not read."""
    if page_size % PAGE_STEP:
        raise InvalidCall(
            f"page size {page_size} does not do on a CUDA device: flash attention reads pages of multiples of {PAGE_STEP} slots",
            f"use --page-size {PAGE_STEP}",
        )


def fix_arithmetic() -> None:
    """Process-wide: matrix products keep their sums in float32 and in one piece.

    Splitting the inner dimension (split-K) is the main reason why cuBLAS takes another order of sums for another number of rows.
    Without it most row buckets agree, and the rest is found by test (``cuda_rows.agreeing``). Only cuBLASLt takes this setting;
    torch raises where plain cuBLAS would have to.
    """
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)  # (in 16 bits, in pieces)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


def device_facts(device: torch.device) -> dict[str, Any]:
    """What of the device and its libraries may change bits. The number of processors is among it: cuBLAS chooses by it."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "processors": properties.multi_processor_count,
        "torch": torch.version.git_version,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        # cuBLAS tells its version to C alone; the wheels that carry it tell theirs.
        "libraries": sorted(f"{found.name} {found.version}" for found in distributions() if found.name.startswith("nvidia-")),
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
    }
