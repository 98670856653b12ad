"""A frozen model's norm and head, through which exits can be differentiated.

Weights of frozen models are laid out for decoding, in many ways, and PyTorch cannot differentiate through our kernels. So the
head's matrix is read off the model's own logits, whatever its layout and family.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip_models import LayerSkipModel

_LARGE = 1e4  # a norm's eps is negligible next to it, and float16 holds it
_READ_ROWS = 256
_CPU_LOGITS, _GPU_LOGITS = 1 << 20, 1 << 26  # numbers of one chunk's logits: 4 MB, or 256 MB
_TOLERANCE = 0.02  # of the largest logit: bfloat16 rounds by less


class FrozenHead:
    """RMSNorm and head of a model, copied in float32: vocab * hidden numbers. chunk_rows: whose logits may exist at once.

    Raises ValueError for a model whose norm and head are anything else.
    """

    @torch.no_grad()
    def __init__(self, model: LayerSkipModel) -> None:
        size, device = model.hidden_size, model.device
        self.eps = float(getattr(model.config, "rms_norm_eps", 1e-6))
        bias = model.logits(torch.zeros(1, size, dtype=model.dtype, device=device))[0].float()
        self.bias = bias.clone() if bias.any() else None
        self.weight = torch.empty(model.vocab_size, size, device=device)  # the norm's weight is in it
        unit = _LARGE / (_LARGE**2 / size + self.eps) ** 0.5  # the norm of a row with a single large number
        for first in range(0, size, _READ_ROWS):
            number = min(_READ_ROWS, size - first)
            rows = torch.zeros(number, size, dtype=model.dtype, device=device)
            rows[torch.arange(number), first + torch.arange(number)] = _LARGE
            self.weight[:, first : first + number] = (model.logits(rows).float() - bias).div_(unit).T
        self.chunk_rows = max((_CPU_LOGITS if device.type == "cpu" else _GPU_LOGITS) // model.vocab_size, 32)
        some = torch.randn(4, size, generator=torch.Generator().manual_seed(0)).to(device, model.dtype)
        theirs = model.logits(some).float()
        if not (theirs - self.logits(some)).abs().max() <= _TOLERANCE * theirs.abs().max():
            raise ValueError(
                "exit adapters need a model that ends in an RMSNorm and a linear head, and this one does not"
            )

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> float32 [rows, vocab]."""
        return F.linear(F.rms_norm(hidden.float(), hidden.shape[-1:], None, self.eps), self.weight, self.bias)
