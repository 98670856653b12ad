"""DEL's release, written down step by step and sharing nothing with the policy, decides what `del` decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.datasets import load_prompts
from layerskip_models import from_transformers, load_demo
from policies import Drafter, DraftRow, RoundContext, RoundRecord, parse_policy
from policies.del_policy import DelExit, DelThreshold
from records import shadow
from selfspec import SelfSpecGenerator
from tiny_llama import tiny_llama

Row = dict[int, tuple[bool, float]]
"""By layer: whether its argmax is the last layer's, and the probability of its argmax."""


class Release:
    """One text. `layer` and `d` are the last choice."""

    def __init__(self, num_layers: int) -> None:
        self.L, self.layer, self.d = num_layers, 1, 1
        exits = range(1, num_layers)
        self.matched = dict.fromkeys(exits, 0.0)
        self.mismatched = dict.fromkeys(exits, 0.0)
        self.matched_sum = dict.fromkeys(exits, 0.0)
        self.mismatched_sum = dict.fromkeys(exits, 0.0)

    def update(self, rows: Iterable[Row]) -> None:
        """Step 1, and then the choice of step 4."""
        sums = (self.matched, self.mismatched, self.matched_sum, self.mismatched_sum)
        for kept in sums:
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
        right = rows[-1][1][0]
        before = rows[:-1]
        self.update([*before[-32:], rows[-1], *([first_token] if right else [])])
        return right

    def round(self, rows: Sequence[Row]) -> None:
        """Step 3. rows: all of a round."""
        kept = list(rows)
        if self.d > 0:
            for index, row in enumerate(rows):
                if not row[self.layer][0]:
                    kept = kept[: index + 1]
                    break
        self.update(kept)

    def choose(self) -> None:
        """Step 4."""
        best = -1.0
        for layer in range(1, self.L):
            a = self.matched[layer] / (self.matched[layer] + self.mismatched[layer])
            tokens, power = 1.0, 1.0
            for d in range(18):
                if d > 0:
                    power *= a
                    tokens += power
                rate = tokens / ((self.L - layer) + (d + 1) * layer)
                if rate > best:
                    best, self.layer, self.d = rate, layer, d

    def tau(self) -> float:
        """Step 5."""
        if not (self.matched[self.layer] and self.mismatched[self.layer]):
            return float("nan")
        right = self.matched_sum[self.layer] / self.matched[self.layer]
        wrong = self.mismatched_sum[self.layer] / self.mismatched[self.layer]
        return (right + wrong) / 2

    def drafts(self, confidences: Sequence[float], ends: Sequence[bool], budget: int) -> int:
        """Step 6. ends: where the drafted token is EOS. Returns the number of drafts."""
        most = min(18, budget)
        for number in range(1, most):
            if ends[number - 1] or confidences[number - 1] < self.tau():
                return number
        return most


def tensors_of(rows: Sequence[Row], chances: Sequence[float] | None) -> Any:
    layers = sorted(rows[0])
    matches = [[row[layer][0] for row in rows] for layer in layers]
    confidences = [[row[layer][1] for row in rows] for layer in layers]
    return shadow(layers, matches, confidences, None if chances is None else [chances] * len(layers))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(2, 7),
    st.integers(1, 40),
    st.integers(0, 10**6),
    st.booleans(),
    st.sampled_from(["bad", "any", "good", "sure"]),
)
def test_the_policy_does_what_the_release_does(
    num_layers: int, num_prompt: int, seed: int, sampled: bool, quality: str
) -> None:
    """Made-up rows: every exit, length and stop. When sampling, acceptance has nothing to do with argmaxes here."""
    random = Random(seed)
    low, high = {"bad": (0.0, 0.3), "any": (0.0, 1.0), "good": (0.8, 1.0), "sure": (0.98, 1.0)}[quality]
    skill = {layer: random.uniform(low, high) for layer in range(1, num_layers)}

    def number() -> float:
        return float(torch.tensor(random.random()))  # as float32 keeps it

    def rows(count: int) -> list[Row]:
        return [{layer: (random.random() < skill[layer], number()) for layer in skill} for _ in range(count)]

    release, policy = Release(num_layers), parse_policy("del", num_layers=num_layers)
    exit_policy, stopping = policy.exit, policy.stopping
    assert stopping is not None
    policy.begin_text()
    prompt, (first_token,) = rows(num_prompt), rows(1)
    asked = policy.observes.prompt_rows_for(num_prompt, 500)
    policy.observe_prompt(tensors_of(prompt[-asked:], [0.5] * asked if sampled else None))
    length, left, index, plain = num_prompt + 1, random.randint(2, 80), 0, release.prompt(prompt, first_token)
    while left > 0:
        context = RoundContext(round_index=index, num_committed=length, remaining_tokens=left)
        plan, budget, index = exit_policy.plan(context), left - 1, index + 1
        run, k, m = [first_token], 0, 0
        if plain:
            assert (plan.exit_layer, plan.max_speculations) == (None, 0)
        else:
            assert (plan.exit_layer, plan.max_speculations) == (release.layer, 18)
            run = rows(19)
        if plan.exit_layer is not None and budget > 0:
            stopping.start_round(plan)
            tau = stopping.threshold(Drafter(release.layer))
            assert (tau is None and release.tau() != release.tau()) or tau == pytest.approx(release.tau(), rel=1e-12)
            ends, drawn = [random.random() < 0.02 for _ in run], [number() for _ in run]
            cap = min(18, budget)
            while k < cap:
                confidence = run[k][release.layer][1]
                row = DraftRow(num_drafted=k, exit_layer=release.layer, position=0, confidence=confidence)
                assert not stopping.stop_before_draw(row)
                if sampled:
                    row = DraftRow(
                        num_drafted=k, exit_layer=release.layer, position=0, confidence=confidence, probability=drawn[k]
                    )
                k += 1
                if ends[k - 1] or stopping.stop_after_draw(row, 7):
                    break
            own = drawn if sampled else [row[release.layer][1] for row in run]
            assert k == release.drafts(own, ends, budget)
            right = [row[release.layer][0] for row in run[:k]]
            m = random.randint(0, k) if sampled else right.index(False) if False in right else k
            run = run[: k + 1]
        else:
            run, k = run[:1], 0
        chances = [0.5] * (m + 1) if sampled else None
        policy.observe(
            RoundRecord(
                index=index,
                num_committed_before=length,
                exit_layer=plan.exit_layer if k else None,
                max_speculations=18,
                draft_tokens=(7,) * k,
                num_accepted=m,
                tokens=(7,) * (m + 1),
                loaded_layers=0,
                stop_cause="after_draw",
                shadow=tensors_of(run[: m + 1], chances),
                rejected=tensors_of(run[m + 1 :], None) if m < k else None,
            )
        )
        if not plain:
            release.round(run)
        plain = False
        left -= m + 1
        length += m + 1


SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 5}


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_recorded_texts_are_the_releases(sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's texts, ended by EOS: every exit, length, stop, threshold, and the layers that a round loads."""
    model, tokenizer = load_demo()
    generator, num_layers = SelfSpecGenerator(model, tokenizer, prefix_cache=0), model.num_layers
    end = tokenizer(";")["input_ids"][-1]
    seen: list[list[Row]] = []
    asked: list[float] = []

    def rows_of(*parts: Any) -> list[Row]:
        found: list[Row] = []
        for part in parts:
            if part is not None:
                kept = {layer: part.rows_of(layer) for layer in range(1, num_layers)}
                found += [{layer: kept[layer][index] for layer in kept} for index in range(part.num_rows)]
        return found

    def watch(owner: type, name: str, note: Any) -> None:
        original = getattr(owner, name)

        def watched(policy: Any, *given: Any) -> Any:
            note(*given)
            return original(policy, *given)

        monkeypatch.setattr(owner, name, watched)

    watch(DelExit, "observe_prompt", lambda prompt: seen.append(rows_of(prompt)))
    watch(DelExit, "observe", lambda record: seen.append(rows_of(record.shadow, record.rejected)))
    watch(DelThreshold, "stop_after_draw", lambda row, token: asked.append(row.probability or row.confidence))
    exits, causes, plain_steps = set(), set(), set()
    for prompt in [*load_prompts()][:6]:
        seen.clear()
        asked.clear()
        result = generator.generate(
            prompt.prompt[:200], max_new_tokens=60, policy="del", eos_token_id=[end], trace=True, **sampling
        )
        release, (first, *rounds), confidences = Release(num_layers), list(seen), list(asked)
        assert result.trace is not None and len(rounds) == len(result.trace)
        trace, left = list(result.trace), 59
        plain_steps.add(first[-1][1][0])
        if release.prompt(first, rounds[0][0]):
            assert trace[0].exit_layer is None
            trace, rounds, left = trace[1:], rounds[1:], left - 1
        for record, rows in zip(trace, rounds, strict=True):
            assert record.loaded_layers == record.num_drafted * (record.exit_layer or 0) + num_layers
            assert len(rows) == record.num_drafted + 1
            if left > 1:
                assert record.exit_layer == release.layer
                tau = release.tau()
                assert record.threshold == (None if tau != tau else pytest.approx(tau, rel=1e-9))
                ends = [token == end for token in record.draft_tokens]
                looked = record.num_drafted - ends[-1]
                own, confidences = confidences[:looked], confidences[looked:]
                padded = [*own, *[1.0] * 18]
                assert release.drafts(padded, [*ends, *[False] * 18], left - 1) == record.num_drafted
                exits.add(record.exit_layer)
                causes.add(record.stop_cause)
            release.round(rows)
            left -= len(record.tokens)
        assert not confidences
    assert len(exits) > 1 and "after_draw" in causes and plain_steps == {True, False}


@pytest.mark.parametrize("native", [False, True])
def test_rejected_rows_and_the_probability_of_what_was_drawn(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' own pass over the text and its drafts has them."""
    dtype = torch.float32 if native else torch.float64
    llama = tiny_llama(num_layers=4, dtype=dtype, late_scale=0.6, seed=3)
    model = from_transformers(llama) if native else from_transformers(llama, layout="plain")
    generator = SelfSpecGenerator(model, prefix_cache=0)
    drawn: list[tuple[int, float | None]] = []
    original = DelThreshold.stop_after_draw

    def watched(policy: DelThreshold, row: DraftRow, token: int) -> bool:
        drawn.append((token, row.probability))
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
                (seen, probability), drawn = drawn[0], drawn[1:]
                scores = logits[record.exit_layer or 0][record.num_committed_before - 1 + index].float() / 0.7
                kept = scores.masked_fill(scores < scores.topk(5).values[-1], -torch.inf).softmax(dim=-1)
                assert seen == token
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
