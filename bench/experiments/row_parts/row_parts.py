"""Ways to cut rows before they meet bytes or a matrix unit, as our kernels do, and what they cost a model.

Every linear of the model gets its inputs as the digits or parts would add up to them; the rest is float32. Compared with the
same weights in float64, along the model's own greedy texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

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


WAYS: dict[str, dict[str, Cut | None]] = {
    "int8": {"float32": None} | {name: digits(n) for n, name in enumerate(("1 digit", "2 digits", "3 digits"), 1)},
    "bfloat16": {"float32": None} | {name: parts(n) for n, name in enumerate(("1 part", "2 parts", "3 parts"), 1)},
}


def rounded(weight: Tensor, kind: str) -> Tensor:
    """The weight as it would be kept, in float32."""
    if kind == "bfloat16":
        return weight.bfloat16().float()
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


def linears_of(model: nn.Module) -> list[nn.Linear]:
    """All linears of a model."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@torch.inference_mode()
def round_weights(model: nn.Module, kind: str) -> None:
    """Round the weights of all linears as they would be kept. kind: of `WAYS`."""
    for linear in linears_of(model):
        linear.weight.copy_(rounded(linear.weight, kind))


@dataclass
class Difference:
    """How distributions differ from the exact ones.

    logit: the largest difference of a log-probability. divergence: sum of KL, in nats. tokens: positions with
    another likeliest token. texts: with at least one such position. margin: the largest lead, in nats, of an exact likeliest
    token over the one found.
    """

    logit: float = 0.0
    divergence: float = 0.0
    positions: int = 0
    tokens: int = 0
    texts: int = 0
    margin: float = 0.0

    def add(self, found: Tensor, exact: Tensor) -> None:
        """Count one text. Both: log-probabilities, float64 [positions, vocabulary]."""
        self.logit = max(self.logit, float((found - exact).abs().max()))
        self.divergence += float((exact.exp() * (exact - found)).sum())
        self.positions += len(exact)
        best, chosen = exact.argmax(-1), found.argmax(-1)
        self.tokens += int((best != chosen).sum())
        self.texts += bool((best != chosen).any())
        lead = exact.gather(1, best[:, None]) - exact.gather(1, chosen[:, None])
        self.margin = max(self.margin, float(lead.max()))


class CutRows:
    """A model of transformers in float32 whose linears take their rows through a way to cut them. The model is changed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cut: Cut | None = None
        self.peak = 0.0
        """The largest number of a row so far, in root mean squares of the row."""
        self._exact = deepcopy(model).double()
        for linear in linears_of(model):
            linear.register_forward_pre_hook(self._before)

    def _before(self, _: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor] | None:
        x = arguments[0]
        if self._cut is None:
            return None
        self.peak = max(self.peak, float((x.abs().amax(-1) / x.square().mean(-1).sqrt()).max()))
        return (self._cut(x),)

    @torch.inference_mode()
    def distributions(self, text: Sequence[int], last: int, cut: Cut | None, *, exact: bool = False) -> Tensor:
        """The log-probabilities, float64 [last, vocabulary], with which a text's last `last` tokens are chosen.

        exact: by float64 arithmetic, without a cut.
        """
        self._cut = cut
        model = self._exact if exact else self._model
        logits: Tensor = model(torch.tensor([text[:-1]]), logits_to_keep=last).logits[0]
        return logits.double().log_softmax(-1)
