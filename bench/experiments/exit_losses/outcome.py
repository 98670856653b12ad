"""What a run of the study made of the model: its losses on held-out text, and how its exits draft on its own text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from bench.experiments.exit_losses.study import OWN_TEXT_PROMPT, Study
from bench.record import Line
from layerskip_models.text_files import write_text
from layerskip_models.training.documents import parse_data_source, split_sources
from layerskip_models.training.evaluation import greedy_continuations, is_looping
from layerskip_models.training.loop import train
from layerskip_models.training.recipe import exit_hidden_states
from layerskip_models.training.training_config import TrainingConfig

_ROWS = 8
"""Sequences whose logits exist at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldOut:
    """blocks: int64 [n, length + 1], an equal number from each source; prompts: the first tokens of each."""

    blocks: Tensor
    prompts: list[list[int]]


def held_out(study: Study, tokenizer: PreTrainedTokenizerBase, num_blocks: int) -> HeldOut:
    """Text that training leaves out, the sources taking turns: the same for all runs.

    Raises ValueError when the data hold out too little for a single sequence.
    """
    size = study.sequence_length + 1
    by_source = []
    for text in study.data:
        _, documents = split_sources([parse_data_source(text)], study.exclude, 0.01)
        encoded = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"] if documents else []
        stream = [token for ids in encoded for token in (*ids, tokenizer.eos_token_id)]
        by_source.append([stream[start : start + size] for start in range(0, len(stream) - size + 1, size)])
    longest = max(map(len, by_source))
    turns = [blocks[turn] for turn in range(longest) for blocks in by_source if turn < len(blocks)][:num_blocks]
    if not turns:
        raise ValueError(f"the held-out documents do not fill a sequence of {study.sequence_length} tokens: add data")
    return HeldOut(blocks=torch.tensor(turns), prompts=[block[:OWN_TEXT_PROMPT] for block in turns])


def outcome(model: LlamaForCausalLM, text: HeldOut, exits: int, num_tokens: int) -> Line:
    """Fields of a record's line.

    loss, agreement: of exit layers 1 to `exits` and of the last layer, per token of held-out text. loops: for each
    prompt whether the greedy text of num_tokens tokens ends in a loop. agrees: for each prompt, by exit layer, "1" or "0"
    for every token of that text but the first: whether the exit would have drafted it.
    """
    model.eval()
    losses, agreement, _ = _exits(model, text.blocks, exits)
    texts = greedy_continuations(model, text.prompts, num_tokens, batch_size=32)
    own = torch.cat([torch.tensor(text.prompts), torch.tensor(texts)], dim=1)
    _, _, chosen = _exits(model, own, exits)
    right = chosen[:, :-1, len(text.prompts[0]) :] == torch.tensor(texts)[:, None, 1:]  # [texts, exits, tokens - 1]
    return {
        "loss": [round(value, 4) for value in losses],
        "agreement": [round(value, 4) for value in agreement],
        "loops": [is_looping(tokens) for tokens in texts],
        "agrees": [
            {str(layer + 1): "".join("01"[flag] for flag in row) for layer, row in enumerate(rows)}
            for rows in right.int().tolist()
        ],
    }


def finished_outcome(config: TrainingConfig, measured: Mapping[str, int], text: HeldOut) -> Line:
    """Train a run and measure its outcome; or find both in its folder, if they are of the same options.

    measured: exits, prompts and max_new_tokens of the measurement.
    """
    path = Path(config.output_dir) / "outcome.json"
    options = json.loads(json.dumps({"training": asdict(config), "measured": dict(measured)}))
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["options"] == options:
            line: Line = found["outcome"]
            return line
    model = LlamaForCausalLM.from_pretrained(train(config), attn_implementation="sdpa")
    result = outcome(model, text, measured["exits"], measured["max_new_tokens"])
    write_text(path, json.dumps({"options": options, "outcome": result}))
    return result


@torch.no_grad()
def _exits(model: LlamaForCausalLM, blocks: Tensor, exits: int) -> tuple[list[float], list[float], Tensor]:
    """Mean loss, agreement with the last layer, and every row's argmax, int64 [n, exits + 1, length]; the last layer last."""
    layers: Sequence[int] = (*range(exits), len(model.model.layers) - 1)
    sums = torch.zeros(len(layers), dtype=torch.float64)
    found = []
    for rows in blocks.split(_ROWS):
        states = exit_hidden_states(model, rows[:, :-1], layers)
        chosen = []
        for place, layer in enumerate(layers):
            logits = model.lm_head(model.model.norm(states[layer])).float()
            sums[place] += F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
            chosen.append(logits.argmax(-1))
        found.append(torch.stack(chosen, dim=1))
    argmax = torch.cat(found)
    agreement = (argmax == argmax[:, -1:]).double().mean((0, 2))
    return (sums / argmax[:, 0].numel()).tolist(), agreement.tolist(), argmax
