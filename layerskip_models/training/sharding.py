"""A model under training divided over processes by PyTorch's FSDP2: weights, gradients and optimiser state, by rows.

A layer is gathered when it computes, forwards and backwards, and let go again. The last norm and the head stay gathered from
the forward pass to the end of the backward pass, since the losses of several exits go through them, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator, init_empty_weights
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter
from transformers import LlamaConfig, LlamaForCausalLM

from layerskip_models.checkpoints.stored_weights import StoredWeights
from layerskip_models.training.held_model import HeldModel, Result
from layerskip_models.training.microbatches import rows_of
from layerskip_models.training.saving import while_writing, write_folder
from layerskip_models.training.start import init_source
from layerskip_models.training.training_config import TrainingConfig

Read = Callable[[str, torch.Size, range], Tensor]
"""read(name, shape, rows): these rows of a parameter, float32. shape: of the whole parameter."""


def check_launched() -> None:
    """Raise ValueError unless a launcher started this process, alone or with others."""
    if not dist.is_initialized():
        raise ValueError(
            "shard divides the model over processes, and this is one alone: put `torchrun --nproc_per_node N` or "
            "`accelerate launch` in front, or leave out --shard"
        )


class ShardedTraining(HeldModel):
    """A model whose rows are divided over the processes, which must all make the same calls in the same order."""

    in_step = True

    def __init__(self, accelerator: Accelerator, config: LlamaConfig, precision: str) -> None:
        """Without weights: `fill` or `load` gives them."""
        self.rank, self.ranks = accelerator.process_index, accelerator.num_processes
        with init_empty_weights(include_buffers=False):
            model = LlamaForCausalLM(config)
        model.tie_weights()
        super().__init__(accelerator, model.to(torch.float32).train())
        self._mesh = init_device_mesh(accelerator.device.type, (self.ranks,))
        # Inside the layers as under autocast: matrices in bfloat16, what goes from layer to layer in float32. The head and
        # the embedding stay float32, which autocast rounds: the gradients of all chunks are added up in it.
        layers = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if precision == "bf16" else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        decoder = self.model.model
        for layer in decoder.layers:
            fully_shard(layer, mesh=self._mesh, mp_policy=layers)
        rest = MixedPrecisionPolicy(cast_forward_inputs=False)
        if not config.tie_word_embeddings:
            fully_shard(decoder.embed_tokens, mesh=self._mesh, mp_policy=rest)
            decoder.embed_tokens.set_unshard_in_backward(False)  # its gradient does not need it
        fully_shard(self.model, mesh=self._mesh, mp_policy=rest)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other
                module.set_gradient_divide_factor(1.0)  # losses have their share of the batch already
        self.model.run_gathered = MethodType(lambda model, function: function(), self.model)
        register_fsdp_forward_method(self.model, "run_gathered")

    def fill(self, read: Read) -> None:
        """Give every parameter this process's rows."""
        filled = {}
        for name, parameter in self.model.named_parameters():
            rows = rows_of(parameter.shape[0], self.rank, self.ranks)
            local = read(name, parameter.shape, rows).to(self._accelerator.device, torch.float32)
            filled[name] = Parameter(self._divided(local, parameter))
        if self.model.config.tie_word_embeddings:
            filled["lm_head.weight"] = filled["model.embed_tokens.weight"]
        self.model.load_state_dict(filled, assign=True)

    def _divided(self, local: Tensor, like: Tensor) -> DTensor:
        return DTensor.from_local(
            local.contiguous(), self._mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
        )

    def gathered(self, function: Callable[[], Result]) -> Result:
        """Run the function with norm and head gathered, and each layer when it computes."""
        found: Result = self.model.run_gathered(function)
        return found

    def released(self) -> None:
        """Frees norm and head."""
        self.model.reshard()

    def _summed(self, totals: Tensor) -> Tensor:
        """The gradients are summed where they were computed."""
        summed: Tensor = self._accelerator.reduce(totals, reduction="sum")
        return summed

    def clip(self, max_norm: float) -> None:
        parameters = list(self.model.parameters())
        norm = torch.nn.utils.get_total_norm([cast(Tensor, parameter.grad) for parameter in parameters])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)

    def save(
        self, path: Path, optimizers: Sequence[torch.optim.Optimizer], write_state: Callable[[Path], None]
    ) -> None:
        """A file of each process, and what write_state adds to them."""
        self.released()
        tensors = self._parameters()
        for name, parameter, optimizer in self._optimised(optimizers):
            tensors |= {f"{kind}.{name}": value for kind, value in optimizer.state[parameter].items()}

        def write(folder: Path) -> None:
            self._accelerator.wait_for_everyone()  # the folder is there
            checkpoint.save(tensors, checkpoint_id=folder)

        def write_all(folder: Path) -> None:
            write(folder)
            write_state(folder)

        if self._accelerator.is_main_process:
            write_folder(path, write_all)
        else:
            write(while_writing(path))

    def load(self, path: Path, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Any number of processes may have written it."""
        tensors = self._parameters()
        try:
            stored = checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
            for name, parameter, optimizer in self._optimised(optimizers):
                for key in stored.keys() - tensors.keys():
                    if key.endswith(f".{name}"):
                        whole = len(cast(TensorStorageMetadata, stored[key]).size) == 0  # a number, in every process
                        value = torch.zeros(()) if whole else torch.zeros_like(parameter)
                        tensors[key] = optimizer.state[parameter][key.removesuffix(f".{name}")] = value
            checkpoint.load(tensors, checkpoint_id=path)
        except (OSError, checkpoint.CheckpointException) as error:
            raise ValueError(
                f"{path} does not hold the shards of all processes: delete this folder, and the run starts over"
            ) from error

    def _parameters(self) -> dict[str, Any]:
        """By their names in a checkpoint."""
        return {f"model.{name}": value.detach() for name, value in self.model.named_parameters()}

    def _optimised(
        self, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Iterator[tuple[str, Parameter, torch.optim.Optimizer]]:
        """Every parameter with its name and the optimiser that moves it."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield names[parameter], parameter, optimizer

    def whole_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """In `dtype` on the CPU, gathered one at a time; in the other processes nothing."""
        self.released()
        found = {}
        for name, parameter in self.model.named_parameters():
            whole = cast(DTensor, parameter.data).full_tensor()
            if self._accelerator.is_main_process:
                found[name] = whole.to("cpu", dtype)
        if found and self.model.config.tie_word_embeddings:
            found["lm_head.weight"] = found["model.embed_tokens.weight"]
        return found


def sharded_model(config: TrainingConfig, accelerator: Accelerator, described: LlamaConfig) -> ShardedTraining:
    """The model at its start: init's, of which each process reads its rows, or a new one, which the first process makes.

    Raises ValueError for a checkpoint that is not what its configuration says.
    """
    described._attn_implementation = "sdpa"
    sharded = ShardedTraining(accelerator, described, config.precision)
    if config.init is None:
        torch.manual_seed(config.seed)
        made = LlamaForCausalLM(described).state_dict() if accelerator.is_main_process else {}
        sharded.fill(partial(_from_first, made, accelerator.device))
        return sharded
    source = init_source(config)
    sharded.model.generation_config = source.generation_config()
    with source.open() as weights:
        sharded.fill(partial(_from_files, weights))
    return sharded


def _from_first(made: dict[str, Tensor], device: torch.device, name: str, shape: torch.Size, rows: range) -> Tensor:
    whole = made[name].to(device) if made else torch.empty(shape, device=device)
    dist.broadcast(whole, src=0)
    return whole[rows.start : rows.stop].clone()


def _from_files(weights: StoredWeights, name: str, shape: torch.Size, rows: range) -> Tensor:
    if not rows:
        return torch.empty(0, *shape[1:])
    return weights.read(name, torch.float32, torch.device("cpu"), [(0, rows)])
