"""Looped Llamas in training: the layers run several times, with the final norm between loops and an exit after each.

Transformers knows no such family, but its Llama layers and the loss of this package's exits are all that one needs. A looped
model is a `LlamaForCausalLM` whose configuration has `num_loops`. Its layers are counted through all loops, as the engine
counts them: with 4 layers, the third loop ends with layer 11. The state after a loop goes into the next one through the same
norm that its exit goes through, so an exit's logits are the head's of what the next loop reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from layerskip_models.families.plain_config import COUNTS
from layerskip_models.text_files import write_text

_FIELDS = (
    "head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    "dtype", "name_or_path", "quantization_config",
)  # fmt: skip


def num_loops(model: LlamaForCausalLM) -> int:
    """Return how often the layers run: 1 for a plain Llama."""
    return int(getattr(model.config, "num_loops", 1))


def layers_with_exits(model: LlamaForCausalLM) -> range:
    """Return the layers whose exits are evaluated: all of a plain model, the last of each loop of a looped one."""
    layers, loops = len(model.model.layers), num_loops(model)
    return range(layers) if loops == 1 else range(layers - 1, layers * loops, layers)


def as_llama(config: Any) -> LlamaConfig:
    """Return the configuration of a `nanbeige` checkpoint as the Llama's that it is within a loop; of others, as it is.

    Raises ValueError for loops without a norm between them.
    """
    if config.model_type != "nanbeige":
        return config
    if config.skip_loop_final_norm:
        raise ValueError(f"{config.name_or_path!r} has no norm between its loops: it can be run, but not trained here")
    return LlamaConfig(**{name: getattr(config, name) for name in (*COUNTS, *_FIELDS) if hasattr(config, name)})


def describe_loops(folder: Path, model: LlamaForCausalLM) -> None:
    """Rewrite the configuration of a saved looped model as one of `nanbeige`, whose layout has Llama's names."""
    path = folder / "config.json"
    described = json.loads(path.read_text(encoding="utf-8"))
    described |= {"architectures": ["NanbeigeForCausalLM"], "model_type": "nanbeige", "skip_loop_final_norm": False}
    described |= {"num_loops": num_loops(model), "rope_theta": described["rope_parameters"]["rope_theta"]}
    write_text(path, json.dumps(described, indent=2) + "\n")
