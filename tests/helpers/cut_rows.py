"""Rows cut before they meet bytes or a matrix unit, as our kernels do, and a model of transformers that takes them so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Cut = Callable[[Tensor], Tensor]


def digits(count: int) -> Cut:
    """Fixed-point numbers of so many bytes, the largest number of a row in the highest one."""

    def cut(x: Tensor) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent + 1 - 8 * count)
        return (x / unit).round() * unit

    return cut


def parts(count: int) -> Cut:
    """So many bfloat16 numbers that add up to nearly x."""

    def cut(x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for _ in range(count):
            total = total + (x - total).bfloat16().float()
        return total

    return cut


class CutRows:
    """A model of transformers in float32 whose linears take their rows through a way to cut them. The model is changed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cut: Cut | None = None
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self._before)

    def _before(self, _: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor] | None:
        return None if self._cut is None else (self._cut(arguments[0]),)

    @torch.inference_mode()
    def distributions(self, text: Sequence[int], last: int, cut: Cut | None) -> Tensor:
        """The log-probabilities, float64 [last, vocabulary], with which a text's last `last` tokens are chosen."""
        self._cut = cut
        logits: Tensor = self._model(torch.tensor([text[:-1]]), logits_to_keep=last).logits[0]
        return logits.double().log_softmax(-1)
