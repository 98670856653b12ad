"""The Triton kernels, in Triton's interpreter where there is no GPU. Importing this skips the module without Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # see conftest.py
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
        """Triton 3.6 takes int() of an array of one number, which NumPy 2.5 refuses."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_lang_tensor

from layerskip_models.kernels import triton_rows  # noqa: E402

# The interpreter multiplies the bits of bfloat16 numbers: there, float16 stands for it.
DOT_DTYPES: Sequence[torch.dtype] = [torch.float32, torch.float16 if DEVICE == "cpu" else torch.bfloat16]
__all__ = ["DEVICE", "DOT_DTYPES", "triton_rows"]
