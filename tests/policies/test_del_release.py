"""DEL's release and Algorithm 1, written down step by step and sharing nothing with the policy, decide as `del` does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerskip_models import from_transformers
from policies import Drafter, DraftRow, RoundContext, parse_policy
from policies.del_policy import DelThreshold
from records import finished, shadow
from selfspec import SelfSpecGenerator
from tiny_llama import tiny_llama

Row = dict[int, tuple[bool, float]]
"""By layer: whether its argmax is the last layer's, and the probability of its argmax."""
NAMES = {False: "del", True: "del:as=printed"}


class Del:
    """One text. `layer` and `d` are the last choice. printed: Algorithm 1 in place of the release."""

    def __init__(self, num_layers: int, printed: bool) -> None:
        self.L, self.printed, self.layer, self.d, self.rounds = num_layers, printed, 1, 1, 0
        self.forget()

    def forget(self) -> None:
        exits = range(1, self.L)
        self.matched, self.mismatched = dict.fromkeys(exits, 0.0), dict.fromkeys(exits, 0.0)
        self.matched_sum, self.mismatched_sum = dict.fromkeys(exits, 0.0), dict.fromkeys(exits, 0.0)

    def update(self, rows: Iterable[Row]) -> None:
        """Step 1, and then the choice."""
        for kept in (self.matched, self.mismatched, self.matched_sum, self.mismatched_sum):
            for layer in kept:
                kept[layer] *= 0.95
        for row in rows:
            for layer, (matches, confidence) in row.items():
                count, total = (self.matched, self.matched_sum) if matches else (self.mismatched, self.mismatched_sum)
                count[layer] += 1
                total[layer] += confidence
        self.choose()

    def prompt(self, rows: Sequence[Row], first_token: Row) -> bool:
        """Step 2. rows: of the whole prompt. Returns whether the row of the first new token was needed."""
        if self.printed:  # "considers the last 32 tokens of the context"
            self.update(rows[-32:])
            return False
        right, before = rows[-1][1][0], rows[:-1]
        self.update([*before[-32:], rows[-1], *([first_token] if right else [])])
        return right

    def round(self, rows: Sequence[Row]) -> None:
        """Step 3; line 20. rows: all of a round."""
        if self.printed and self.rounds == 0:
            self.forget()  # line 4
        self.rounds += 1
        kept = list(rows)
        if self.d > 0 or self.printed:
            for index, row in enumerate(rows):
                if not row[self.layer][0]:
                    kept = kept[: index + 1]
                    break
        self.update(kept)

    def choose(self) -> None:
        """Step 4; line 24."""
        best = -1.0
        for layer in range(1, self.L):
            a = self.matched[layer] / (self.matched[layer] + self.mismatched[layer])
            tokens, power = 1.0, 1.0
            for d in range(19 if self.printed else 18):
                if d > 0:
                    power *= a
                    tokens += power
                rate = tokens / ((self.L - layer) + (d + 1) * layer)
                if rate > best:
                    best, self.layer, self.d = rate, layer, d

    def tau(self) -> float:
        """Step 5; line 28."""
        if not (self.matched[self.layer] and self.mismatched[self.layer]):
            return float("nan")
        right = self.matched_sum[self.layer] / self.matched[self.layer]
        wrong = self.mismatched_sum[self.layer] / self.mismatched[self.layer]
        return (right + wrong) / 2

    def drafts(self, confidences: Sequence[float], ends: Sequence[bool], budget: int) -> int:
        """Step 6; lines 7 to 13. ends: where the drafted token is EOS. Returns the number of drafts."""
        for index in range(min(18, budget)):
            if self.printed and confidences[index] < self.tau():
                return index
            if ends[index] or (not self.printed and confidences[index] < self.tau()):
                return index + 1
        return min(18, budget)


def tensors_of(rows: Sequence[Row], chances: Sequence[float] | None) -> Any:
    layers = sorted(rows[0])
    matches = [[row[layer][0] for row in rows] for layer in layers]
    confidences = [[row[layer][1] for row in rows] for layer in layers]
    return shadow(layers, matches, confidences, None if chances is None else [chances] * len(layers))


QUALITIES = {"bad": (0.0, 0.3), "any": (0.0, 1.0), "good": (0.8, 1.0), "sure": (0.98, 1.0)}


@settings(max_examples=150, deadline=None)
@given(
    st.integers(2, 7), st.integers(1, 40), st.integers(0, 10**6), st.booleans(), st.booleans(), st.sampled_from([*QUALITIES])
)  # fmt: skip
def test_made_up_rounds(layers: int, num_prompt: int, seed: int, sampled: bool, printed: bool, quality: str) -> None:
    """Every exit, length and stop. When sampling, acceptance has nothing to do with argmaxes here."""
    random = Random(seed)
    skill = {layer: random.uniform(*QUALITIES[quality]) for layer in range(1, layers)}

    def number() -> float:
        return float(torch.tensor(random.random()))  # as float32 keeps it

    def rows(count: int) -> list[Row]:
        return [{layer: (random.random() < skill[layer], number()) for layer in skill} for _ in range(count)]

    oracle, policy = Del(layers, printed), parse_policy(NAMES[printed], num_layers=layers)
    stopping = policy.stopping
    assert stopping is not None
    policy.begin_text()
    prompt, (first_token,) = rows(num_prompt), rows(1)
    asked = policy.observes.prompt_rows_for(num_prompt, 500)
    policy.observe_prompt(tensors_of(prompt[-asked:], [0.5] * asked if sampled else None))
    left, plain = random.randint(2, 80), oracle.prompt(prompt, first_token)
    while left > 0:
        plan, budget = policy.exit.plan(RoundContext(round_index=0, num_committed=9, remaining_tokens=left)), left - 1
        assert (plan.exit_layer, plan.max_speculations) == ((None, 0) if plain else (oracle.layer, 18))
        run, k, m = [first_token] if plain else rows(19), 0, 0
        if plan.exit_layer is not None and budget > 0:
            stopping.start_round(plan)
            tau = stopping.threshold(Drafter(oracle.layer))
            assert (tau is None and oracle.tau() != oracle.tau()) or tau == pytest.approx(oracle.tau(), rel=1e-12)
            ends, drawn, sure = (
                [random.random() < 0.02 for _ in run],
                [number() for _ in run],
                [r[oracle.layer][1] for r in run],
            )
            while k < min(18, budget):
                row = {"num_drafted": k, "exit_layer": oracle.layer, "position": 0, "confidence": sure[k]}
                if stopping.stop_before_draw(DraftRow(**row)):
                    break
                k += 1
                after = DraftRow(**row, probability=drawn[k - 1] if sampled else None)
                if ends[k - 1] or stopping.stop_after_draw(after, 7):
                    break
            assert k == oracle.drafts(drawn if sampled and not printed else sure, ends, budget)
            right = [row[oracle.layer][0] for row in run[:k]]
            m = random.randint(0, k) if sampled else right.index(False) if False in right else k
        run = run[: k + 1]
        seen = tensors_of(run[: m + 1], [0.5] * (m + 1) if sampled else None)
        record = finished(k, m, exit_layer=plan.exit_layer or 0, seen=seen)
        policy.observe(replace(record, rejected=tensors_of(run[m + 1 :], None) if m < k else None))
        if not plain:
            oracle.round(run)
        plain, left = False, left - m - 1


@pytest.mark.parametrize("native", [False, True])
def test_rejected_rows_and_the_probability_of_what_was_drawn(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' own pass over the text and its drafts has them."""
    dtype = torch.float32 if native else torch.float64
    llama = tiny_llama(num_layers=4, dtype=dtype, late_scale=0.6, seed=3)
    model = from_transformers(llama) if native else from_transformers(llama, layout="plain")
    generator = SelfSpecGenerator(model, prefix_cache=0)
    drawn: list[tuple[int, float | None, float | None]] = []
    original = DelThreshold.stop_after_draw

    def watched(policy: DelThreshold, row: DraftRow, token: int) -> bool:
        drawn.append((token, row.probability, policy.threshold(Drafter(row.exit_layer))))
        return original(policy, row, token)

    monkeypatch.setattr(DelThreshold, "stop_after_draw", watched)
    sampled: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 5, "seed": 1}
    for sampling in ({}, sampled):
        drawn.clear()
        result = generator.generate(
            [3, 9, 1, 4], max_new_tokens=40, policy="del", eos_token_id=[], trace=True, **sampling
        )
        text, rejected = result.sequences[0].tolist(), 0
        for record in result.trace or ():
            before = text[: record.num_committed_before] + list(record.draft_tokens)
            with torch.no_grad():
                states = llama.model(torch.tensor([before]), output_hidden_states=True, use_cache=False).hidden_states
                logits = [
                    llama.lm_head(llama.model.norm(one) if layer < 4 else one)[0] for layer, one in enumerate(states)
                ]
            for index, token in enumerate(record.draft_tokens):
                (seen, probability, threshold), drawn = drawn[0], drawn[1:]
                scores = logits[record.exit_layer or 0][record.num_committed_before - 1 + index].float() / 0.7
                kept = scores.masked_fill(scores < scores.topk(5).values[-1], -torch.inf).softmax(dim=-1)
                assert (seen, record.threshold) == (token, threshold)
                assert probability == (pytest.approx(float(kept[token]), abs=1e-4) if sampling else None)
            if record.rejected is None:
                assert record.num_accepted == record.num_drafted
                continue
            first = record.num_committed_before + record.num_accepted
            assert record.rejected.num_rows == len(before) - first > 0
            for layer in (1, 2, 3):
                best = logits[layer][first:].float().softmax(dim=-1).max(dim=-1)
                matches = best.indices == logits[4][first:].argmax(dim=-1)
                rows = record.rejected.rows_of(layer)
                assert [match for match, _ in rows] == matches.tolist()
                assert [sure for _, sure in rows] == pytest.approx(best.values.tolist(), abs=1e-4)
            rejected += 1
        assert rejected > 2
