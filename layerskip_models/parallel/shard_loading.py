"""Reads this rank's part of a checkpoint, tensor by tensor out of its safetensors files: nobody holds the whole model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from layerskip_models.backends.tensor_parallel import tensor_parallel
from layerskip_models.checkpoints.loading import find_source, resolve_device, resolve_dtype, resolve_layout
from layerskip_models.exits.lean import ExitsChoice, with_exits
from layerskip_models.grouped_weight import CHUNK
from layerskip_models.linear import Layout, Whole
from layerskip_models.model import LayerSkipModel
from layerskip_models.parallel.cores import share_cores
from layerskip_models.parallel.launched import local_rank
from layerskip_models.parallel.ranks import Ranks
from layerskip_models.parallel.shard_plan import ShardPlan


def load_shard(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    layout: Layout | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    exits: ExitsChoice = "auto",
) -> LayerSkipModel:
    """This process's part of a checkpoint whose other parts the processes launched with it load; arguments as `load_model`'s.

    Every process must call it. On CUDA each takes the device of its local rank, on CPUs its share of the cores. Peak memory
    is the part, and one layer of it.
    Raises what `load_model` raises; ValueError for a model that cannot be divided by their number; RankError if the
    processes do not find each other.
    """
    target = _own_device(resolve_device(device))
    source = find_source(name_or_path, revision, local_files_only)
    dtype, layout, keep_bits = resolve_layout(source.config, dtype, layout, target)
    config = source.float_config()
    chosen = resolve_dtype(dtype, target, getattr(config, "dtype", None))
    ranks = Ranks.join(target)
    if target.type == "cpu":
        share_cores(ranks)
    plan = ShardPlan.of(config, ranks.rank, ranks.size, CHUNK if keep_bits else 1)
    part = source.read_model(
        chosen, layout, lambda module: target, keep_bits=keep_bits, plan=plan, whole_of=partial(_whole, plan, ranks)
    )
    model = tensor_parallel(part, plan, ranks)
    ranks.collect(None)  # nobody begins before all have read theirs, which may take longer than an answer
    return with_exits(model, exits)


def _whole(plan: ShardPlan, ranks: Ranks, kind: str, weight: Tensor) -> Whole | None:
    """See `WholeOf`."""
    inputs = plan.num_inputs(kind)
    return None if inputs is None else Whole(inputs, ranks.largest(weight.abs().amax(dim=1)))


def _own_device(device: torch.device) -> torch.device:
    if device.type != "cuda" or device.index is not None:
        return device
    own = torch.device("cuda", local_rank())
    torch.cuda.set_device(own)
    return own
