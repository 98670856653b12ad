"""The models that are measured: checkpoints, GGUF files, and synthetic weights in a given shape."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.synthetic import LOOPED, PREFIX, SHAPES, LoopedWeights, parse_synthetic, synthetic_llama
from layerskip_models import DEMO_PATH, LayerSkipModel, from_transformers, load_model, load_tokenizer
from layerskip_models.checkpoints.checkpoint_files import resolve_checkpoint
from layerskip_models.checkpoints.conversion import build_model
from layerskip_models.checkpoints.gguf_checkpoint import gguf_file
from layerskip_models.checkpoints.loading import FEW_BITS, load_config, load_transformers, resolve_device, resolve_dtype


def is_synthetic(checkpoint: str) -> bool:
    """Tell whether a name stands for a shape with random weights."""
    return checkpoint.startswith(PREFIX)


def file_of(checkpoint: str) -> Path | None:
    """Return the GGUF file that a name stands for, None for another kind of checkpoint."""
    return None if is_synthetic(checkpoint) else gguf_file(resolve_checkpoint(checkpoint))


def num_layers_of(checkpoint: str) -> int:
    """Return how many layers a checkpoint has, without loading its weights. Raises as loading does."""
    if is_synthetic(checkpoint):
        return int(SHAPES[parse_synthetic(checkpoint)[0]]["num_hidden_layers"])
    return int(load_config(checkpoint).num_hidden_layers)


def open_tokenizer(checkpoint: str) -> PreTrainedTokenizerBase:
    """Open the checkpoint's tokenizer; synthetic weights know no words, and take the demo's for their prompts."""
    return load_tokenizer(str(DEMO_PATH) if is_synthetic(checkpoint) else checkpoint)


def open_model(checkpoint: str, dtype: str, device: str, rows: int | None = None) -> LayerSkipModel:
    """Open the model alone, so that its weights are in memory once. rows: as of `load_model`."""
    if is_synthetic(checkpoint):
        layout = dtype if dtype in FEW_BITS else None
        if (shape := checkpoint.removeprefix(PREFIX)) in LOOPED:
            target = resolve_device(device)
            kept = resolve_dtype("float32" if layout else dtype, target, torch.bfloat16)
            return build_model(LoopedWeights(shape), dtype=kept, layout=layout, device=target)
        network = load_network(checkpoint, dtype if layout is None else "float32", device)
        made = from_transformers(network, layout=layout, release=True)
        return made if rows is None else made.with_rows(rows)
    return load_model(checkpoint, dtype=dtype, device=device, rows=rows)


def load_network(checkpoint: str, dtype: str, device: str) -> PreTrainedModel:
    """Load transformers' own model."""
    if is_synthetic(checkpoint):
        shape, recipe = parse_synthetic(checkpoint)
        target = resolve_device(device)
        return synthetic_llama(shape, recipe, dtype=resolve_dtype(dtype, target, torch.bfloat16), device=target)
    return load_transformers(checkpoint, dtype=dtype, device=device)


def model_name(checkpoint: str) -> str:
    """Return the name that a record gives a checkpoint: for a local one its folder or file alone."""
    if is_synthetic(checkpoint):
        return f"synthetic weights ({checkpoint.removeprefix(PREFIX)})"
    if checkpoint == str(DEMO_PATH):
        return "the demo model"
    return Path(checkpoint).resolve().name if Path(checkpoint).exists() else checkpoint


def weights_digest(checkpoint: str) -> str | None:
    """Return 12 hexadecimal digits of a local checkpoint's files, None if there are none (a hub name)."""
    path = Path(checkpoint)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        return None
    summary = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(2**20):
                summary.update(block)
    return summary.hexdigest()[:12]
