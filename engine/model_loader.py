"""A model through transformers: load it, make it ours, and prove that it is the same model; or refuse it by name."""

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from engine import attention
from engine.calls import CallSlot, ObserveCall
from engine.errors import ModelFilesInvalid, ModelNotFound, UnsupportedModel
from engine.llama_packing import is_llama_shaped, pack_llama
from engine.model import LoadedModel
from engine.model_support import refuse_by_config, refuse_by_observation
from engine.pools import DTYPES
from engine.probe import eager_logits, probe_tokens, refuse_difference
from engine.rowwise import FunctionalRows, make_rowwise


def load_through_transformers(folder: Path, *, weights: str, kv_dtype: str, threads: int, device: str, fused: bool) -> LoadedModel:
    """See ``engine.model.load_model``."""
    on_cpu = torch.device(device).type == "cpu"
    _prepare_device(kv_dtype, device)
    config = _read_config(folder)
    refuse_by_config(config, str(folder), on_cpu=on_cpu)
    module = _read_weights(folder, config, "float32" if on_cpu else kv_dtype).to(device)
    slot = CallSlot(threads)
    for part in module.modules():
        setattr(part, attention.SLOT_ATTRIBUTE, slot)
    text_config = config.get_text_config()
    seen = _observe(module, slot, text_config.vocab_size)
    max_context = int(text_config.max_position_embeddings)
    refuse_by_observation(seen, text_config.num_hidden_layers, max_context, type(module).__name__, on_cpu=on_cpu)
    num_kv_heads, head_dim, _ = seen.shapes[0]

    llama = pack_llama(module, weights, threads) if on_cpu and fused and is_llama_shaped(module) else None
    if on_cpu and llama is None:
        make_rowwise(module, slot, weights)
    tokens = probe_tokens(max_context, text_config.vocab_size)
    expected = eager_logits(module, tokens)
    watching = FunctionalRows(threads, weights)
    model = LoadedModel(
        module=None if llama is not None else module,
        llama=llama,
        slot=slot,
        folder=folder,
        architecture=type(module).__name__,
        num_layers=text_config.num_hidden_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=text_config.vocab_size,
        max_context=max_context,
        eos_token_ids=_eos_token_ids(module),
        weights=weights if on_cpu else kv_dtype,
        kv_dtype=kv_dtype,
        threads=threads,
        device=device,
        functional_rows=watching,
    )
    refuse_difference(model, tokens, expected)
    return model if watching.caught else replace(model, functional_rows=None)


def _prepare_device(kv_dtype: str, device: str) -> None:
    """Refuse what ``device`` does not compute, and set what holds for the whole process."""
    if torch.device(device).type != "cpu":
        from engine.cuda_device import check_device, fix_arithmetic

        check_device(device, kv_dtype)
        fix_arithmetic()


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    if not folder.is_dir():
        raise ModelNotFound(f"no folder {folder}", "give what engine.model_source.resolve returned", name=str(folder))
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ModelFilesInvalid(
            f"{folder} lacks config.json or safetensors weights", "see engine.model_source.resolve", name=str(folder)
        )
    try:
        kind = json.loads((folder / "config.json").read_bytes()).get("model_type")
    except ValueError as error:
        raise ModelFilesInvalid(f"{folder / 'config.json'} is not JSON: {error}", "download it again", name=str(folder)) from error
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        # Not the library's own words: they advise to trust the code.
        raise UnsupportedModel(
            f"model type {kind} is unknown to transformers {version('transformers')}",
            "a newer transformers may know it; code that models bring along is not run",
            name=str(folder),
            field="model_type",
        ) from error


def _read_weights(folder: Path, config: Any, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=DTYPES[dtype],
            attn_implementation=attention.NAME,
            experts_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(
            f"{config.model_type}: {error}", "see docs for the models that are served", name=config.model_type
        ) from error
    except OSError as error:
        raise ModelFilesInvalid(f"{folder}: {error}", "check the files", name=str(folder)) from error
    # transformers fills what is missing with random numbers and a warning.
    lacking = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if lacking:
        raise ModelFilesInvalid(
            f"{folder} lacks the weights {', '.join(lacking[:5])}",
            "the files are incomplete or of another model",
            name=str(folder),
        )
    return module.eval().requires_grad_(False)


def _observe(module: Any, slot: CallSlot, vocab_size: int) -> ObserveCall:
    call = ObserveCall()
    positions = torch.arange(8, device=module.device)[None]
    slot.call = call
    try:
        with torch.inference_mode():
            module(input_ids=positions % vocab_size, position_ids=positions, use_cache=False)
    except UnsupportedModel as error:
        raise UnsupportedModel(
            f"{type(module).__name__}: {error.message}", error.hint, name=type(module).__name__, field=error.field
        ) from error
    finally:
        slot.call = None
    return call


def _eos_token_ids(module: Any) -> tuple[int, ...]:
    for config in (module.generation_config, module.config.get_text_config()):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return tuple(sorted({int(token) for token in (found if isinstance(found, list | tuple) else [found])}))
    return ()
