"""Parts of the tensors in a checkpoint's safetensors files, as a plan says: nothing else of them is read.

Of weights that others quantised the numbers are read in parts, too, and their scales whole, which are a few percent of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerskip_models.checkpoints.packed_weights import NUMBERS, Cut, dequantise, in_four_bits, modules_of
from layerskip_models.checkpoints.schemes import Scheme, SchemeOf
from layerskip_models.checkpoints.weight_files import Tensors
from layerskip_models.four_bits import FourBitWeight
from layerskip_models.parallel.shard_plan import ShardPlan

Shapes = Mapping[str, tuple[int, ...]]
"""Of the parameters of the whole model, by their names."""


class Parts:
    """The tensors of a checkpoint's safetensors files, of which parts are read. Used in a `with` statement.

    Raises ValueError for a tensor of another shape than in `shapes`.
    """

    def __init__(self, tensors: Tensors, shapes: Shapes) -> None:
        self._name, self._files = tensors.name, tensors
        tensors.check_shapes(shapes)

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.__exit__(*error)

    def has(self, name: str) -> bool:
        """Whether a parameter is in the files."""
        return name in self._files.where

    def read(self, name: str, plan: ShardPlan, dtype: torch.dtype, device: torch.device) -> Tensor:
        """This rank's part of one parameter. Raises ValueError for one that is missing, of another shape, or not finite."""
        value = self._part(name, plan)
        if plan.added_once(name) and plan.rank:
            value = torch.zeros_like(value)
        # A copy, since what is cut may be a view of the whole, mapped file.
        value = value.to(device=device, dtype=dtype, copy=True).contiguous()
        if not bool(value.isfinite().all()):
            raise ValueError(
                f"{self._name} holds NaN or infinite weights, in {name}: the checkpoint is damaged or its training diverged; "
                "load another one"
            )
        return value

    def read_packed(self, module: str, plan: ShardPlan) -> FourBitWeight | None:
        """This rank's part of a layer's matrix that stays in 4 bits; None for one that does not."""
        return None

    def _part(self, name: str, plan: ShardPlan) -> Tensor:
        stored, pieces = self._files.part(name), plan.pieces(name)
        if pieces is None:
            whole: Tensor = stored[:]
            return whole
        dim, parts = pieces
        return one_behind_the_other(
            [stored[p.start : p.stop] if dim == 0 else stored[:, p.start : p.stop] for p in parts]
        )

    def _joined(self, module: str, found: Sequence[FourBitWeight | None]) -> FourBitWeight | None:
        """What `cuts_of` a matrix came to: all are kept in 4 bits, or none. Raises ValueError for scales of NaN."""
        weights = [weight for weight in found if weight is not None]
        if not weights:
            return None
        weight = FourBitWeight.cat(weights)
        if not weight.is_finite():
            raise ValueError(f"{self._name} holds NaN or infinite scales, in {module}: copy or download it again")
        return weight


class QuantisedParts(Parts):
    """The same of a checkpoint that GPTQ or compressed-tensors quantised: floats are what it stands for.

    keep_packed: matrices of layers stay in 4 bits where they can. scheme_of: what is said of each module.
    """

    def __init__(self, tensors: Tensors, shapes: Shapes, *, scheme_of: SchemeOf, keep_packed: bool) -> None:
        self._quantised = modules_of(tensors.names)
        names = {f"{module}.weight" for module in self._quantised}
        super().__init__(tensors, {name: shape for name, shape in shapes.items() if name not in names})
        self._scheme_of, self._keep_packed, self._shapes = scheme_of, keep_packed, shapes

    def has(self, name: str) -> bool:
        return super().has(name) or name.removesuffix(".weight") in self._quantised

    def read_packed(self, module: str, plan: ShardPlan) -> FourBitWeight | None:
        if not self._keep_packed or module not in self._quantised or not module.startswith("model.layers."):
            return None
        with self._told(module):
            stored = self._tensors(module)
            found = [
                in_four_bits(stored, scheme=self._scheme(module), cut=cut) for cut in cuts_of(f"{module}.weight", plan)
            ]
        return self._joined(module, found)

    def _part(self, name: str, plan: ShardPlan) -> Tensor:
        module = name.removesuffix(".weight")
        if module == name or module not in self._quantised:
            return super()._part(name, plan)
        with self._told(module):
            stored = self._tensors(module)
            found = [
                dequantise(stored, scheme=self._scheme(module), cut=cut) for cut in cuts_of(f"{module}.weight", plan)
            ]
        return one_behind_the_other(found)

    def _scheme(self, module: str) -> Scheme:
        rows, columns = self._shapes[f"{module}.weight"]
        return replace(self._scheme_of(module), shape=(rows, columns))

    def _tensors(self, module: str) -> dict[str, Any]:
        """Those of a module by their names within it: of the numbers a slice of an open file, of all else everything."""
        found: dict[str, Any] = {}
        for part in self._quantised[module]:
            stored = self._files.part(f"{module}.{part}")
            found[part] = stored if part in NUMBERS else stored[...]
        return found

    @contextmanager
    def _told(self, module: str) -> Iterator[None]:
        """Within it errors name the module."""
        try:
            yield
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{self._name}: the quantised weight of {module} cannot be read: {error}") from error


def one_behind_the_other(parts: Sequence[Tensor]) -> Tensor:
    """A single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def cuts_of(name: str, plan: ShardPlan) -> list[Cut]:
    """The parts of a parameter that are kept, one behind the other."""
    pieces = plan.pieces(name)
    if pieces is None:
        return [None]
    dim, parts = pieces
    return [(dim, range(part.start, part.stop)) for part in parts]
