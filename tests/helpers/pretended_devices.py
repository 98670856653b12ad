"""Devices that a CPU pretends to have: their tensors are kept apart from the host's and from each other's.

Within `PretendedDevices` a tensor that is made on "xla:0", "xla:1", .. (names that PyTorch knows) lies in
the host's memory, but says that it is there. As on GPUs, an operation on tensors of two devices fails, unless it copies or
one of them is a single number of the host's; and NumPy sees none of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

_WHOLE = (F.scaled_dot_product_attention, Tensor.__setitem__, Tensor.tolist, torch.where)
"""These make tensors of their own in C++, where no dispatch mode sees that they belong to such a device."""
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, Tensor.__setitem__)


class _There(Tensor):
    """A tensor on such a device. kept: where its numbers are. To PyTorch's C++ it is on "meta", which every build has."""

    kept: Tensor

    @staticmethod
    def __new__(cls, kept: Tensor, device: torch.device) -> _There:
        shape = {"strides": kept.stride(), "storage_offset": kept.storage_offset(), "dtype": kept.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, kept.size(), device="meta", **shape)

    def __init__(self, kept: Tensor, device: torch.device) -> None:
        self.kept, self.there = kept, device

    @property
    def device(self) -> torch.device:
        return self.there

    def __repr__(self, **options: Any) -> str:
        return f"_There({self.kept}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class PretendedDevices(TorchDispatchMode):
    """Within it there are such devices."""

    def __init__(self) -> None:
        super().__init__()
        self._functions = _Functions()

    def __enter__(self) -> PretendedDevices:
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._functions.__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "xla":
            return func(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
        if func in _WHOLE and any(isinstance(argument, _There) for argument in args):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on what is kept. Its result is where its arguments are, or where it is asked for."""
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if func not in _COPIES:
        places = {tensor.device for tensor in inputs if isinstance(tensor, _There) or tensor.dim()}
        assert len(places) <= 1, f"{func} of tensors on {sorted(map(str, places))}"
    there = [tensor.device for tensor in inputs if isinstance(tensor, _There)]
    asked = kwargs.get("device")
    device = torch.device(asked) if asked is not None else there[0] if there else torch.device("cpu")
    if asked is not None and device.type == "xla":
        kwargs = {**kwargs, "device": torch.device("cpu")}
    own_args, own_kwargs = tree_map_only(_There, lambda tensor: tensor.kept, (args, kwargs))
    found = func(*own_args, **own_kwargs)
    if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:  # what was written to is returned as it is
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args)) | kwargs
        writes = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        written = tuple(given[name] for name in writes if name in given)
        return found if not func._schema.returns else written[0] if len(written) == 1 else written
    if device.type != "xla":
        return found
    return tree_map(lambda leaf: _There(leaf, device) if isinstance(leaf, Tensor) else leaf, found)
