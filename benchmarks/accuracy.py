"""What smaller weights and pages cost in accuracy: ``python -m benchmarks.accuracy``.

The text is our own: README.md and the pages of docs/. Every variant predicts each of its tokens from the true ones before it, in
windows of ``WINDOW`` tokens. Perplexity is e to the mean negative log likelihood; agreement is how often a variant's likeliest
token is that of fp32 weights with float32 pages; divergence is the largest difference of a token's log likelihood from there.
"""

import argparse
import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from engine import model_source
from engine.geometry import DTYPE_BYTES
from engine.kernels.panels import FORMATS
from engine.model import load_model
from engine.pools import DTYPES
from engine.runner import make_runner
from engine.threads import default_threads

WINDOW, ROWS, PAGE_SIZE = 512, 64, 16


@dataclass(frozen=True)
class Variant:
    weights: str
    kv_dtype: str


@dataclass(frozen=True)
class Scores:
    """Of every token of the text but the first of each window."""

    likelihoods: npt.NDArray[np.float64]  #: log likelihood of the true token
    likeliest: npt.NDArray[np.int64]


def read_text(root: Path) -> str:
    return "\n\n".join(path.read_text() for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))])


def score(folder: Path, variant: Variant, windows: list[npt.NDArray[np.int64]]) -> Scores:
    model = load_model(folder, weights=variant.weights, kv_dtype=variant.kv_dtype, threads=default_threads())
    shape = (-(-WINDOW // PAGE_SIZE), *model.geometry(PAGE_SIZE).page_shape)
    runner = make_runner(model, torch.zeros(shape, dtype=DTYPES[variant.kv_dtype]), PAGE_SIZE, WINDOW)
    table = np.arange(shape[0], dtype=np.int32)[None]
    likelihoods, likeliest = [], []
    for window in windows:
        for start in range(0, len(window) - 1, ROWS):
            rows = np.arange(start, min(start + ROWS, len(window) - 1), dtype=np.int32)
            every = np.arange(len(rows), dtype=np.int32)
            logits = runner.run_rows(window[rows], rows, table, np.zeros_like(rows), every).double()
            likelihoods.append(torch.log_softmax(logits, -1)[torch.arange(len(rows)), torch.from_numpy(window[rows + 1])].numpy())
            likeliest.append(logits.argmax(-1).numpy())
    return Scores(np.concatenate(likelihoods), np.concatenate(likeliest))


def compare(found: Scores, reference: Scores) -> dict[str, float]:
    return {
        "perplexity": float(np.exp(-found.likelihoods.mean())),
        "agreement": float((found.likeliest == reference.likeliest).mean()),
        "divergence": float(np.abs(found.likelihoods - reference.likelihoods).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of weights and pages in smaller number formats.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--windows", type=int, default=24, help=f"windows of {WINDOW} tokens, spread over the text")
    parser.add_argument("--json", type=Path, default=Path("bench-results/accuracy.json"))
    arguments = parser.parse_args()
    folder = model_source.resolve(arguments.model)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = np.array(tokenizer.encode(read_text(Path(__file__).parents[1])).ids, np.int64)
    starts = np.linspace(0, len(tokens) - WINDOW, arguments.windows).astype(int)
    windows = [tokens[start : start + WINDOW] for start in starts]
    reference: Scores | None = None
    rows = []
    for weights, kv_dtype in itertools.product(FORMATS, DTYPE_BYTES):
        variant = Variant(weights, kv_dtype)
        found = score(folder, variant, windows)
        reference = reference or found
        rows.append({**asdict(variant), **compare(found, reference)})
        print("{weights:>5} {kv_dtype:>9}: perplexity {perplexity:.4f}, agreement {agreement:.2%}".format(**rows[-1]), flush=True)
    assert reference is not None
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"model": arguments.model, "tokens": reference.likelihoods.size, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
