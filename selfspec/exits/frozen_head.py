"""A frozen model's norm and head: an exit's loss and its gradient, in closed form.

Weights of frozen models are laid out for decoding, in many ways, and PyTorch cannot differentiate through our kernels. So the
head's matrix is read off the model's own logits, whatever its layout and family, and the gradient is written out. No graph
is kept, and logits exist for a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip_models import LayerSkipModel

_LARGE = 1e4  # a norm's eps is negligible next to it, and float16 holds it
_READ_ROWS = 256
_CPU_LOGITS, _GPU_LOGITS = 1 << 20, 1 << 26  # numbers of one chunk's logits: 4 MB, or 256 MB
_TOLERANCE = 0.02  # of the largest logit: bfloat16 rounds by less


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The model's distribution at some rows.

    probabilities: float32 [rows, vocab]. tokens: int64 [rows], the likeliest. negative_entropy: float32 [rows], the sum of
    p log p.
    """

    probabilities: Tensor
    tokens: Tensor
    negative_entropy: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ExitLoss:
    """Losses of one exit at some rows, each [rows].

    ce: -log q(label). kl: KL(target || exit), in nats. agrees: bool, the likeliest tokens are the same.
    """

    ce: Tensor
    kl: Tensor
    agrees: Tensor


class FrozenHead:
    """RMSNorm and head of a model, copied in `dtype`: vocab * hidden numbers.

    Raises ValueError for a model whose norm and head are anything else.
    """

    @torch.no_grad()
    def __init__(self, model: LayerSkipModel, dtype: torch.dtype = torch.float32) -> None:
        size, device = model.hidden_size, model.device
        self.eps = float(getattr(model.config, "rms_norm_eps", 1e-6))
        self.size, self.vocab_size = size, model.vocab_size
        bias = model.logits(torch.zeros(1, size, dtype=model.dtype, device=device))[0].float()
        self.bias = bias.clone() if bias.any() else None
        self.weight = torch.empty(self.vocab_size, size, dtype=dtype, device=device)  # the norm's weight is in it
        unit = _LARGE / (_LARGE**2 / size + self.eps) ** 0.5  # the norm of a row with a single large number
        for first in range(0, size, _READ_ROWS):
            number = min(_READ_ROWS, size - first)
            rows = torch.zeros(number, size, dtype=model.dtype, device=device)
            rows[torch.arange(number), first + torch.arange(number)] = _LARGE
            self.weight[:, first : first + number] = (model.logits(rows).float() - bias).div_(unit).T.to(dtype)
        self._check(model)

    def _check(self, model: LayerSkipModel) -> None:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(4, self.size, generator=generator).to(model.device)
        theirs = model.logits(rows.to(model.dtype)).float()
        if not (theirs - self.logits(rows)).abs().max() <= _TOLERANCE * theirs.abs().max():
            raise ValueError(
                "exit adapters need a model that ends in an RMSNorm and a linear head, and this one does not"
            )

    def chunks(self, rows: int) -> Iterator[slice]:
        """Slices that cover this many rows, of as many as logits should exist for at once."""
        size = max((_CPU_LOGITS if self.weight.device.type == "cpu" else _GPU_LOGITS) // self.vocab_size, 32)
        for first in range(0, rows, size):
            yield slice(first, min(first + size, rows))

    def _normed(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden / rms, 1 / rms) in float32: [rows, hidden] and [rows, 1]."""
        hidden = hidden.float()
        factor = torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + self.eps)
        return hidden * factor, factor

    def _of_normed(self, normed: Tensor) -> Tensor:
        logits = F.linear(normed.to(self.weight.dtype), self.weight).float()
        return logits if self.bias is None else logits.add_(self.bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> float32 [rows, vocab]."""
        return self._of_normed(self._normed(hidden)[0])

    def target(self, hidden: Tensor) -> Target:
        """Compute the model's distribution at these rows. hidden: of the last layer, [rows, hidden]."""
        logits = self.logits(hidden)
        tokens = logits.argmax(dim=-1)
        logits.sub_(logits.logsumexp(dim=-1, keepdim=True))
        probabilities = logits.exp()
        return Target(probabilities, tokens, torch.linalg.vecdot(probabilities, logits))

    @torch.no_grad()
    def loss(
        self,
        hidden: Tensor,
        target: Target,
        labels: Tensor,
        *,
        ce_weight: float = 1.0,
        kl_weight: float = 1.0,
        gradient: Tensor | None = None,
    ) -> ExitLoss:
        """Compute an exit's losses, row by row. hidden: [rows, hidden], the norm's input. labels: int64 [rows].

        gradient: if given, float32 [rows, hidden]; filled with the derivative of ce_weight * ce + kl_weight * kl.
        """
        normed, factor = self._normed(hidden)
        logq = self._of_normed(normed)
        agrees = logq.argmax(dim=-1) == target.tokens
        logq.sub_(logq.logsumexp(dim=-1, keepdim=True))
        at_labels = labels.unsqueeze(-1)
        ce = -logq.gather(-1, at_labels).squeeze(-1)
        kl = target.negative_entropy - torch.linalg.vecdot(target.probabilities, logq)
        if gradient is not None:
            d_logits = logq.exp_().mul_(ce_weight + kl_weight)
            d_logits.sub_(target.probabilities, alpha=kl_weight)
            d_logits.scatter_add_(-1, at_labels, torch.full_like(ce, -ce_weight).unsqueeze(-1))
            d_normed = (d_logits.to(self.weight.dtype) @ self.weight).float()
            along = torch.linalg.vecdot(d_normed, normed).unsqueeze(-1) / self.size
            gradient.copy_(factor * (d_normed - normed * along))
        return ExitLoss(ce, kl, agrees)

    @torch.no_grad()
    def overlap(self, hidden: Tensor, target: Target) -> Tensor:
        """Sum min(p, q), [rows]: the chance, at temperature 1, that a token which the exit draws is accepted."""
        q = self.logits(hidden).softmax(dim=-1)
        return torch.minimum(q, target.probabilities, out=q).sum(dim=-1)
