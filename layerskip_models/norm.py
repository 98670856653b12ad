"""RMSNorm in as few kernels as the dtype allows: at batch 1 a layer's small operations cost as much as a matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    """x * weight / sqrt(mean(x^2) + eps) over the last dimension.

    In float32 written as x / hypot(|x|, sqrt(h eps)) * (sqrt(h) weight), which is four kernels where `F.rms_norm` takes
    about six on a CPU (10 against 14 us for one row of 256, measured); three where the next matrix takes the factors.
    In any other dtype computed in float32 and rounded to it before the weight is applied, as transformers does: in float64,
    too, or its logits would differ by 1e-5.

    live: the weight belongs to somebody who may change it in place. Then it is used as it is, in float32 as well.
    """

    def __init__(self, weight: Tensor, eps: float, live: bool = False) -> None:
        size = weight.shape[-1]
        self.size = size
        self.eps = eps
        self._through_float32 = live or weight.dtype != torch.float32
        self._weight: Tensor | None = weight if self._through_float32 else weight * size**0.5
        self._root = torch.full((1, 1), (size * eps) ** 0.5, dtype=weight.dtype, device=weight.device)

    @property
    def factors(self) -> Tensor | None:
        """sqrt(h) weight, float32 [hidden]; None in other dtypes, of a live weight, and once the next matrix has them."""
        return None if self._through_float32 else self._weight

    @property
    def weight(self) -> Tensor:
        """[hidden], as the checkpoint has it. ValueError once the next matrix has it."""
        if self._weight is None:
            raise ValueError("the next matrix has this norm's weight")
        return self._weight if self._through_float32 else self._weight / self.size**0.5

    @property
    def scale(self) -> Tensor:
        """[hidden]: what rows of mean square 1 are multiplied by here, whether or not the next matrix has the weight."""
        if self._weight is None:
            return torch.full((self.size,), self.size**-0.5, dtype=self._root.dtype, device=self._root.device)
        return self.weight

    def fold(self) -> Tensor | None:
        """Stop applying the factors and return them, [hidden]: the caller multiplies the next matrix's columns by them.

        None where that would round otherwise than transformers does (not in float32), and of a live weight: nothing changes
        then.
        """
        if self._through_float32:
            return None
        factors, self._weight = self._weight, None
        return factors

    def __call__(self, x: Tensor) -> Tensor:
        """x: [.., hidden]. Returns a new tensor of the same shape and dtype."""
        if self._through_float32:
            normed = F.rms_norm(x.float(), (self.size,), None, self.eps).to(x.dtype)
        else:
            length = torch.linalg.vector_norm(x, 2.0, -1, True).hypot_(self._root)
            normed = torch.div(x, length)
        return normed if self._weight is None else normed.mul_(self._weight)
