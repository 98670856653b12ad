"""Memory and traffic of a training divided over processes, computed from a configuration, without making any weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from layerskip_models.training.microbatches import rows_of
from layerskip_models.training.recipe import enabled_exits, run_layer

_LOGIT_BYTES = 16  # of one logit at its peak: itself, its log-probability, and the gradients of both, in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSize:
    """Bytes of the process that holds most.

    weights, gradients, optimizer_state: its share, held throughout.
    head, head_gradients: last norm and head (with a tied embedding), gathered from the forward pass to the end of the
        backward pass.
    layers: the peak while the backward pass goes through the layers: the weights of two layers, the gradient of one, and
        the same gradient in float32 as it is sent.
    embedding: an untied one, gathered at the very end, when its gradient is made.
    activations: kept by one pass for its backward pass. logits: of one chunk of rows.
    gathered_per_pass, reduced_per_pass: weights gathered and gradients summed in one micro batch.
    exchanged_per_step: momentum and updates of Muon's matrices, once a step.
    """

    ranks: int
    weights: int
    gradients: int
    optimizer_state: int
    head: int
    head_gradients: int
    layers: int
    embedding: int
    activations: int
    logits: int
    gathered_per_pass: int
    reduced_per_pass: int
    exchanged_per_step: int

    @property
    def held(self) -> int:
        return self.weights + self.gradients + self.optimizer_state

    @property
    def gathered(self) -> int:
        """The peak of what is gathered, with gradients that are not summed yet."""
        return self.head + self.head_gradients + max(self.layers, self.embedding)

    @property
    def together(self) -> int:
        """An upper bound: activations are at their most before the layers' gradients are."""
        return self.held + self.gathered + self.activations + self.logits

    def sent(self, counted: int) -> int:
        """Bytes that a process sends, in a ring, to gather or sum `counted` bytes."""
        return round(counted * (self.ranks - 1) / self.ranks)


def training_size(
    config: PreTrainedConfig,
    ranks: int,
    *,
    optimizer: str = "adamw",
    precision: str = "bf16",
    micro_batch_tokens: int = 1024,
    sequence_length: int = 1024,
    loss_chunk_rows: int = 1024,
    rotation: int = 4,
) -> TrainingSize:
    """The size of `selfspec train --shard` in `ranks` processes, with these options and the rotational curriculum.

    Raises ValueError for what is no Llama, and for a micro batch shorter than a sequence.
    """
    if config.model_type != "llama":
        raise ValueError(f"only Llama checkpoints are trained, this one is of type {config.model_type!r}")
    if micro_batch_tokens < sequence_length:
        raise ValueError(
            f"a micro batch of {micro_batch_tokens} tokens holds no sequence of {sequence_length}: raise it, or shorten them"
        )
    described: Any = config
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(_one_layer(described), dtype=torch.float32)
        shapes = [(name, parameter.shape) for name, parameter in model.named_parameters()]
    num_layers = int(described.num_hidden_layers)
    held = state = 0
    counts = {"layer": 0, "head": 0, "embedding": 0, "matrices": 0}
    for name, shape in shapes:
        times = num_layers if "layers." in name else 1
        whole, mine = shape.numel(), len(rows_of(shape[0], 0, ranks)) * shape[1:].numel()
        counts[_unit(name, bool(described.tie_word_embeddings))] += whole
        muon = optimizer == "muon" and "layers." in name and len(shape) == 2
        counts["matrices"] += times * whole * muon
        held += times * mine
        state += times * mine * (1 if muon else 2)
    inside = 2 if precision == "bf16" else 4
    layer, head, embedding = counts["layer"], counts["head"], counts["embedding"]
    rows = micro_batch_tokens // sequence_length
    exits = max(len(enabled_exits("rotational", num_layers, step, rotation, rotation)) for step in range(rotation))
    states = rows * sequence_length * int(described.hidden_size) * 4
    return TrainingSize(
        ranks=ranks,
        weights=4 * held,
        gradients=4 * held,
        optimizer_state=4 * state,
        head=4 * head,
        head_gradients=4 * head,
        layers=layer * (3 * inside + 4),
        embedding=4 * embedding,
        activations=num_layers * layer_activations(described, rows, sequence_length, precision) + (1 + exits) * states,
        logits=min(loss_chunk_rows, rows * sequence_length) * int(described.vocab_size) * _LOGIT_BYTES,
        gathered_per_pass=2 * num_layers * layer * inside + 4 * (head + embedding),
        reduced_per_pass=4 * (num_layers * layer + head + embedding),
        exchanged_per_step=2 * 4 * counts["matrices"],
    )


def layer_activations(config: PreTrainedConfig, rows: int, length: int, precision: str) -> int:
    """Bytes that a layer of transformers keeps for its backward pass over `rows` sequences.

    Traced with tensors that have no memory, so it is what PyTorch's operators keep, with its fused attention.
    """
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = tensor
        return tensor

    inside = torch.bfloat16 if precision == "bf16" else torch.float32
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(_one_layer(config), dtype=inside, attn_implementation="sdpa")
        layer = model.model.layers[0]
        weights = {parameter.untyped_storage()._cdata for parameter in layer.parameters()}
        hidden = torch.empty(rows, length, int(model.config.hidden_size), requires_grad=True)
        positions = torch.arange(length)[None]
        rotary = model.model.rotary_emb(hidden, positions)
        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
        ):
            run_layer(layer, hidden, positions, rotary)
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _one_layer(config: PreTrainedConfig) -> PreTrainedConfig:
    return type(config).from_dict({**config.to_dict(), "num_hidden_layers": 1})


def _unit(name: str, tied: bool) -> str:
    """The unit that a parameter is gathered with."""
    if "layers." in name:
        return "layer"
    return "embedding" if name == "model.embed_tokens.weight" and not tied else "head"
