"""Ways to round a matrix for drafts, as the float32 numbers that they leave. Some know the inputs that the matrix gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from layerskip_models.four_bit_rounding import round_to_four_bits

_POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
_DAMPING = 0.01
"""This share of the mean of the squared inputs is added to each of them, as GPTQ does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a matrix gets. second: sum of x x^T, float64 [in, in]. size: mean magnitude of each input, float32 [in]."""

    second: Tensor
    size: Tensor


Rounding = Callable[[Tensor, Inputs], Tensor]


def to_eight_bits(weight: Tensor, inputs: Inputs) -> Tensor:
    """One scale for each output."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scale).round() * scale


def to_four_bits(weight: Tensor, inputs: Inputs, *, group: int, symmetric: bool) -> Tensor:
    """What `layerskip_models.four_bit_rounding` makes of it."""
    return round_to_four_bits(weight, group=group, symmetric=symmetric).values()


def upper_plane(weight: Tensor, inputs: Inputs, *, group: int) -> Tensor:
    """The upper four bits of eight, rounded: a plane of its own in a matrix of 8 bits with scales by groups."""
    grouped = weight.unflatten(1, (-1, group))
    scale = grouped.abs().amax(dim=2, keepdim=True) / 127
    upper = ((grouped / scale).round() / 16).round().clamp(-8, 7)
    return (16 * upper * scale).flatten(1)


def with_scaled_inputs(weight: Tensor, inputs: Inputs, *, group: int, symmetric: bool) -> Tensor:
    """Inputs that are large get finer steps: the power of their size that leaves the smallest error of the products.

    Source: AWQ (Lin et al. 2023, arXiv 2306.00978), section 3.2, with all layers' inputs those of the model in full.
    """
    best, least = weight, torch.inf
    for power in _POWERS:
        scale = inputs.size.clamp(min=1e-6) ** power
        scale = scale / (scale.max() * scale.min()).sqrt()
        rounded = to_four_bits(weight * scale, inputs, group=group, symmetric=symmetric) / scale
        error = (weight - rounded).double()
        loss = float((error @ inputs.second * error).sum())
        if loss < least:
            best, least = rounded, loss
    return best


def with_feedback(weight: Tensor, inputs: Inputs, *, group: int, symmetric: bool) -> Tensor:
    """Each input's error is made up for by those that follow it; scales are chosen as a group is reached.

    Source: GPTQ (Frantar et al. 2022, arXiv 2210.17323), algorithm 1, with the inputs in their own order.
    """
    left, second = weight.double().clone(), inputs.second.clone()
    unused = second.diagonal() == 0
    second[unused, unused] = 1
    left[:, unused] = 0
    columns = second.shape[0]
    second += _DAMPING * second.diagonal().mean() * torch.eye(columns, dtype=second.dtype)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(second))
    factor = torch.linalg.cholesky(inverse, upper=True)
    rounded = torch.zeros_like(left)
    for first in range(0, columns, group):
        here = left[:, first : first + group]
        fitted = round_to_four_bits(_padded(here), group=group, symmetric=symmetric)
        scale = fitted.groups[:, :1].double()
        offset = -8 * scale if fitted.offsets is None else fitted.offsets[:, :1].double()
        if fitted.factors is not None:
            scale, offset = scale * fitted.factors[:, None], offset * fitted.factors[:, None]
        errors = torch.zeros_like(here)
        for place in range(group):
            at = first + place
            value = here[:, place : place + 1]
            steps = ((value - offset) / torch.where(scale == 0, 1.0, scale)).round().clamp(0, 15)
            rounded[:, at : at + 1] = steps * scale + offset
            errors[:, place : place + 1] = (value - rounded[:, at : at + 1]) / factor[at, at]
            here[:, place:] -= errors[:, place : place + 1] * factor[at : at + 1, at : first + group]
        left[:, first + group :] -= errors @ factor[first : first + group, first + group :]
    return rounded.float()


def _padded(weight: Tensor) -> Tensor:
    """A group of inputs as a matrix of 64, which 4-bit weights must have."""
    times = 64 // weight.shape[1]
    return weight.float().repeat(1, times) if times > 1 else weight.float()


def roundings(group: int) -> Iterator[tuple[str, Rounding]]:
    """All ways with their names. group: inputs that share a scale."""
    yield "8 bits, a scale for each output", to_eight_bits
    for symmetric, form in ((True, "a scale"), (False, "scale and offset")):
        about = f"4 bits, {form} for each {group}"
        ways = {
            "to nearest": to_four_bits,
            "inputs scaled (AWQ)": with_scaled_inputs,
            "error feedback (GPTQ)": with_feedback,
        }
        for name, way in ways.items():
            yield f"{about}, {name}", partial(way, group=group, symmetric=symmetric)
    yield f"upper half of 8 bits, a scale for each {group}", partial(upper_plane, group=group)
