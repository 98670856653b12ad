"""Algorithm 1 of Pacer, as plain as it is printed, decides what our policy decided on recorded rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from layerskip_models import from_transformers
from policies import parse_policy
from preverifiers import random_preverification
from selfspec import SelfSpecGenerator
from tiny_llama import tiny_llama

L = 6
PROMPTS = ([1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6, 1, 2])


@pytest.fixture(scope="module")
def generator() -> SelfSpecGenerator:
    model = from_transformers(tiny_llama(num_layers=L, late_scale=0.5, dtype=torch.float64, seed=2), layout="plain")
    return SelfSpecGenerator(model, prefix_cache=0)


def pacer_round(estimates: Sequence[Sequence[float]], b: int, t: float, rho: float) -> tuple[int, list[int]]:
    """Lines 4 to 19 for one round: how many tokens are drafted, and the i of each block. t begins anew (our reading).

    estimates: what M_B said of each block.
    """
    y, i, starts = 0, 1, []  # 4, 5
    for alphas in estimates:  # 6
        assert len(alphas) == b  # 7
        starts.append(i)  # 8
        i += b  # 11
        y += b  # 13
        if sum(alphas) / len(alphas) <= t:  # 15
            break  # 16
        t = t * rho  # 18
    return y, starts


@pytest.mark.parametrize(("b", "t", "rho"), [(2, 0.35, 1.3), (1, 0.3, 1.2), (1, 0.5, 1.0)])
def test_pacer_decides_what_its_algorithm_does(generator: SelfSpecGenerator, b: int, t: float, rho: float) -> None:
    preverification = random_preverification(generator.model)
    asked: list[tuple[int, list[float]]] = []
    estimate = preverification.estimate

    def watched(context: Any, layer: int, position: int, first_index: int, *rest: Any) -> list[float]:
        found = estimate(context, layer, position, first_index, *rest)
        asked.append((first_index, found))
        return found

    preverification.estimate = watched  # type: ignore[method-assign]
    policy = parse_policy(
        f"pacer:random,b={b},t={t},rho={rho},exit_layer={preverification.exit_layers[0]}",
        num_layers=L,
        preverifier=lambda path: preverification,
    )
    lengths = set()
    for ids in PROMPTS:
        asked.clear()
        result = generator.generate(ids, max_new_tokens=50, policy=policy, do_sample=False, eos_token_id=[], trace=True)
        assert result.trace is not None
        blocks = list(asked)
        for record in result.trace:
            own, blocks = blocks[: record.preverifier_layers], blocks[record.preverifier_layers :]
            drafted, starts = pacer_round([alphas for _, alphas in own], b, t, rho)
            assert [first for first, _ in own] == starts
            if record.stop_cause == "after_draw" and record.num_drafted < record.max_speculations:
                assert record.num_drafted == drafted
                lengths.add(drafted)
            else:  # the cap or the budget: a last block that ends there is not judged
                assert drafted <= record.num_drafted <= drafted + b
        assert not blocks
    assert lengths
