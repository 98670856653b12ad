"""Algorithm 1 of DEL and of Pacer, as plain as they are printed, decide what our policies decided on recorded rounds.

DEL's release has a file of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from layerskip_models import from_transformers
from policies import DelExit, RoundRecord, parse_policy
from preverifiers import random_preverification
from selfspec import SelfSpecGenerator
from tiny_llama import tiny_llama

OMEGA, D_MAX, L = 0.95, 18, 6
PROMPTS = ([1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6, 1, 2])
Rows = list[tuple[bool, float]]


@pytest.fixture(scope="module")
def generator() -> SelfSpecGenerator:
    model = from_transformers(tiny_llama(num_layers=L, late_scale=0.5, dtype=torch.float64, seed=2), layout="plain")
    return SelfSpecGenerator(model, prefix_cache=0)


def shown_to_del(patch: pytest.MonkeyPatch) -> list[dict[int, Rows]]:
    """The shadow tokens that DEL's exit policy is shown from now on: of a prompt, and round by round."""
    seen: list[dict[int, Rows]] = []

    def watch(name: str) -> None:
        original = getattr(DelExit, name)

        def observe(policy: DelExit, given: Any) -> None:
            shadow = given.shadow if isinstance(given, RoundRecord) else given
            seen.append({layer: shadow.rows_of(layer) for layer in range(1, L)})
            original(policy, given)

        patch.setattr(DelExit, name, observe)

    watch("observe_prompt")
    watch("observe")
    return seen


def S(a: Sequence[float]) -> float:
    """Below eq. 1: the sum of omega^(r - i - 1) a[i]."""
    r = len(a)
    return sum(OMEGA ** (r - i - 1) * a[i] for i in range(r))


class DelUpdate:
    """Algorithm 1, lines 4 and 18 to 30. u counts all compared rows, where u_r leaves the last one out."""

    def __init__(self) -> None:
        self.c: dict[int, list[float]] = {layer: [] for layer in range(1, L)}  # line 4
        self.tcs: dict[int, list[float]] = {layer: [] for layer in range(1, L)}
        self.fcs: dict[int, list[float]] = {layer: [] for layer in range(1, L)}
        self.n: list[float] = []

    def update(self, shadow: dict[int, Rows]) -> None:
        self.n.append(len(shadow[1]))  # line 20: rows 0 .. u_r are compared
        for layer, seen in shadow.items():
            self.c[layer].append(sum(match for match, _ in seen))  # 21
            self.tcs[layer].append(sum(cs for match, cs in seen if match))  # 25
            self.fcs[layer].append(sum(cs for match, cs in seen if not match))  # 26

    def alpha_of(self, layer: int) -> float:
        return S(self.c[layer]) / S(self.n)  # 23

    def TPL(self, layer: int, d: int) -> float:
        alpha = self.alpha_of(layer)
        return sum(alpha**i for i in range(d + 1)) / (d * layer + L)

    def best(self, layer: int) -> float:
        return max(self.TPL(layer, d) for d in range(D_MAX + 1))  # 24

    def tau(self, layer: int) -> float:
        """Line 28; mismatched rows by their number, and 0 / 0 is not a number."""
        wrong = [n - c for n, c in zip(self.n, self.c[layer])]
        if not (S(self.c[layer]) and S(wrong)):
            return math.nan
        return (S(self.tcs[layer]) / S(self.c[layer]) + S(self.fcs[layer]) / S(wrong)) / 2


def test_del_decides_what_its_algorithm_does(generator: SelfSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    exits, stops, shown = set(), set(), shown_to_del(monkeypatch)
    for ids in PROMPTS:
        shown.clear()
        result = generator.generate(ids, max_new_tokens=50, policy="del:as=printed", eos_token_id=[], trace=True)
        assert result.trace is not None
        counted, decided_by = DelUpdate(), DelUpdate()
        shadow, *rounds = shown
        decided_by.update(shadow)  # line 1
        for record, seen in zip(result.trace, rounds, strict=True):
            left = 50 - 1 - sum(len(done.tokens) for done in result.trace[: record.index])
            layer, tau = record.exit_layer, record.threshold
            if left == 1:
                assert layer is None  # nothing can be drafted before the text's last token
                continue
            assert layer is not None and record.confidences is not None
            best = max(range(1, L), key=decided_by.best)
            assert layer == best or decided_by.best(layer) == pytest.approx(decided_by.best(best), rel=1e-12)
            expected = decided_by.tau(layer)
            assert tau == (
                None if math.isnan(expected) else pytest.approx(expected, abs=1e-6)
            )  # of float32 confidences
            below = [s < expected for s in record.confidences]  # line 9
            cap = min(D_MAX, left - 1)
            assert record.num_drafted == (below.index(True) if True in below else cap)
            counted.update(seen)
            decided_by = counted
            exits.add(layer)
            stops.add(record.stop_cause)
    assert len(exits) > 1 and "before_draw" in stops


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
