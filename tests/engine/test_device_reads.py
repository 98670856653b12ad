"""How often the host reads from a device: on CUDA each copy waits for all that was launched before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from layerskip_models.choices import Choices
from layerskip_models.transfer import read_rows
from policies import Drafter, ShadowTokens
from policies.spide import AcceptanceTable, read_shadow
from pretended_devices import PretendedDevices
from selfspec.engine.sampling import Sampler
from selfspec.engine.verification import _judge_greedy

DEVICE = torch.device("xla:0")
READS = (Tensor.tolist, Tensor.item, Tensor.__int__, Tensor.__float__, Tensor.__bool__)


class Reads(TorchFunctionMode):
    """Counts them."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and not args[0].is_cpu:
            self.count += 1
        return func(*args, **(kwargs or {}))


def both(read: Callable[[torch.device], Any]) -> int:
    """How often a device was read from, for what is the same from the host's memory."""
    expected = read(torch.device("cpu"))
    with PretendedDevices(), Reads() as reads:
        assert read(DEVICE) == expected
    return reads.count


def choices(device: torch.device) -> Choices:
    numbers = torch.tensor([[1.5, math.inf, -2.0], [0.5, 0.25, 1.0]])
    return Choices(torch.tensor([7, 1 << 40, 0]).to(device), numbers.to(device))


def test_tokens_and_numbers_come_in_one_copy() -> None:
    assert both(lambda device: choices(device).read()) == 1
    assert both(lambda device: choices(device).outputs()[0][:3]) == 1
    assert both(lambda device: read_rows(torch.tensor([3]).to(device), torch.tensor([[0.5]]).to(device))) == 1


def shadow(device: torch.device, probabilities: bool = False) -> ShadowTokens:
    return ShadowTokens(
        layers=(1, 2),
        tokens=torch.tensor([[3, 4, 5], [3, 9, 5]]).to(device),
        confidences=torch.tensor([[0.5, 0.25, 0.75], [1.0, 0.125, 0.5]]).to(device),
        target_tokens=torch.tensor([3, 4, 6]).to(device),
        target_probabilities=torch.full((2, 3), 0.25).to(device) if probabilities else None,
    )


@pytest.mark.parametrize("probabilities", [False, True])
def test_what_is_learned_from_comes_in_one_copy(probabilities: bool) -> None:
    assert both(lambda device: shadow(device).rows_of(2)) == 1
    assert both(lambda device: list(read_shadow(shadow(device, probabilities)))) == 1

    def learned(device: torch.device) -> Any:
        table = AcceptanceTable((Drafter(1), Drafter(2)))
        confidences = table.observe_shadow(shadow(device, probabilities))
        return confidences, table.state()

    assert both(learned) == 1


def test_greedy_rows_are_verified_from_one_copy() -> None:
    logits = torch.eye(4)[[2, 1, 3]]

    def verified(device: torch.device) -> Any:
        sampler = Sampler([], None)  # type: ignore[arg-type]
        text = SimpleNamespace(sampler=sampler, tokens=torch.zeros(1, 9, dtype=torch.long), length=3)
        draft: Any = SimpleNamespace(sequence=text, rows=[0, 2, 1], tokens=[2, 1])
        _judge_greedy(draft, logits.to(device))
        return draft.num_accepted, draft.block

    assert both(verified) == 1
