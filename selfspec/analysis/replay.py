"""What any fixed setting would do, from one traced run.

While drafts are accepted they equal the model's own greedy text, so whether draft j is accepted depends only on whether
layer E's argmax after that text is its next token. One greedy run that records every layer's argmax at every position, under
whatever policy, therefore decides the rounds of every (exit layer, length): exactly, but for near-ties of the arithmetic,
with EOS off (a wrong draft could otherwise be EOS and end a draft early). Where only some positions were recorded, or the run
sampled, the settings are estimated from each layer's acceptance. What an adaptive policy would have done cannot be replayed:
it looks at drafts that were never made. Of steered exits all is an estimate: what one says of a row depends on where the
round began, and in the traced run each row is steered by the one before it, as the first draft of a round is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from policies import CostModel, ObservationSpec, Policy, autoregressive, tokens_per_cost
from policies.spide import shadow_acceptance
from selfspec.engine.results import mean, ratio
from selfspec.generator import GenerationResult, SelfSpecGenerator

GRID_LENGTHS = tuple(range(1, 9))
"""Drafts a round of the fixed settings that others are compared with."""


def watching_all_layers(policy: Policy, num_layers: int) -> Policy:
    """Give the same policy, with all layers' shadow tokens in every record. They cost time, and it learns from them."""
    watched = ObservationSpec(shadow_layers=tuple(range(1, num_layers)))
    return Policy(policy.exit, policy.stopping, policy.name, also=watched)


@dataclass(frozen=True, kw_only=True)
class AgreementTrace:
    """A text and where each layer would have said the same.

    tokens: the new ones, N of them. agrees: per recorded exit layer, N-1 entries: whether its argmax after new token i is
    new token i+1; when sampling the chance that its draft is accepted; None where nothing was recorded.
    """

    tokens: tuple[int, ...]
    agrees: Mapping[int, tuple[float | None, ...]]
    num_layers: int

    def agreement(self, exit_layer: int) -> float | None:
        """Return the share of recorded positions where a layer agrees with the last one; None without any."""
        return mean(self.agrees[exit_layer])

    @property
    def coverage(self) -> float:
        """Return the share of the positions that were recorded."""
        rows = list(self.agrees.values())
        return mean(float(value is not None) for value in rows[0]) or 0.0 if rows else 0.0

    @cached_property  # a grid asks for every cell
    def is_complete(self) -> bool:
        """True if `replay` is exact: every position of a greedy run was recorded."""
        known = all(value in (0.0, 1.0) for row in self.agrees.values() for value in row)
        return known and (bool(self.agrees) or len(self.tokens) <= 1)

    @cached_property  # every length is replayed from them
    def runs(self) -> Mapping[int, tuple[int, ...]]:
        """Count, per exit layer and from each position on, at how many positions it agrees without a break."""
        found = {}
        for layer, row in self.agrees.items():
            run, backwards = 0, []
            for agrees in reversed(row):
                run = run + 1 if agrees else 0
                backwards.append(run)
            found[layer] = tuple(reversed(backwards))
        return found


def agreement_trace(result: GenerationResult, num_layers: int) -> AgreementTrace:
    """Collect what a run that kept its trace recorded. Tokens after a stop inside a round are left out."""
    assert result.trace is not None, "generate with trace=True"
    size = max(len(result.new_tokens) - 1, 0)
    first = result.stats.num_prompt_tokens + 1
    layers = sorted({layer for record in result.trace if record.shadow is not None for layer in record.shadow.layers})
    agrees: dict[int, list[float | None]] = {layer: [None] * size for layer in layers}
    for record in result.trace:
        if record.shadow is None:
            continue
        start = record.num_committed_before - first  # row 0 is the last committed token, new token number `start`
        for layer, values in zip(record.shadow.layers, shadow_acceptance(record.shadow).tolist()):
            for offset, value in enumerate(values):
                if start + offset < size:
                    agrees[layer][start + offset] = value
    rows = {layer: tuple(values) for layer, values in agrees.items()}
    return AgreementTrace(tokens=tuple(result.new_tokens), agrees=rows, num_layers=num_layers)


def trace_agreement(generator: SelfSpecGenerator, prompt: Tensor | str, max_new_tokens: int) -> AgreementTrace:
    """Decode autoregressively and greedily, EOS off, and record every layer's argmax. prompt: int64 [n], or text."""
    return trace_agreements(generator, [prompt], max_new_tokens)[0]


def trace_agreements(
    generator: SelfSpecGenerator,
    prompts: Sequence[Tensor | str],
    max_new_tokens: int,
    batch_size: int = 1,
    deepest: int | None = None,
) -> list[AgreementTrace]:
    """Do as `trace_agreement` does with several prompts, `batch_size` at a time in shared passes.

    deepest: the last layer whose argmax is recorded, by default the last but one.
    """
    num_layers = generator.model.num_layers
    watched = watching_all_layers(autoregressive(num_layers), num_layers if deepest is None else deepest + 1)
    greedy: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": [], "trace": True}
    results = generator.generate_batch(prompts, policy=watched, batch_size=batch_size, **greedy)
    return [agreement_trace(result, num_layers) for result in results]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The rounds of one setting on one text. drafted, accepted: per round, 0 and 0 for one without speculation."""

    exit_layer: int
    num_layers: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def rounds(self) -> int:
        return len(self.drafted)

    @property
    def num_tokens(self) -> int:
        """Count the tokens committed in rounds: all but the one from prefill."""
        return self.rounds + sum(self.accepted)

    @property
    def loaded_layers(self) -> int:
        """Count the layers run, weight loads: k * E + L in a round with k drafts, L in one without."""
        return sum(self.drafted) * self.exit_layer + self.rounds * self.num_layers

    @property
    def etpl(self) -> float | None:
        return ratio(self.num_tokens, self.loaded_layers)

    @property
    def acceptance_rate(self) -> float | None:
        return ratio(sum(self.accepted), sum(self.drafted))

    @property
    def tokens_per_round(self) -> float | None:
        return ratio(self.num_tokens, self.rounds)

    def cost(self, cost: CostModel) -> float:
        """Add up what all rounds cost, in the cost model's unit. Rounds of one length cost the same."""
        of_length = {count: cost.round(self.exit_layer, count) for count in {*self.drafted} - {0}}
        return sum(of_length[count] if count else cost.autoregressive() for count in self.drafted)


def replay(trace: AgreementTrace, exit_layer: int, num_speculations: int, *, adapts: bool = False) -> Replay:
    """Work out the rounds that `ls:E-G` would have on the traced text, or `fs:E-G`, whose length adapts.

    Raises ValueError when the trace is not complete.
    """
    if not trace.is_complete:
        raise ValueError("the trace does not cover every position: use fixed_settings, which estimates then")
    runs = trace.runs.get(exit_layer, ())  # empty if there was no round
    total = len(trace.tokens)
    committed = 1  # the token from prefill
    drafted: list[int] = []
    accepted: list[int] = []
    while committed < total:
        cap = min(num_speculations, total - committed - 1)
        accepted.append(min(runs[committed - 1], cap))
        drafted.append(cap)
        committed += accepted[-1] + 1
        if adapts:
            num_speculations = max(0, num_speculations + (1 if accepted[-1] == cap else -1))
    return Replay(exit_layer=exit_layer, num_layers=trace.num_layers, drafted=tuple(drafted), accepted=tuple(accepted))


def wave_sweeps(trace: AgreementTrace, num_loops: int) -> list[int]:
    """Count the sweeps from each token to the next one in `wave:loop=1`: one more than the last loop that chose another."""
    ends = [trace.agrees[trace.num_layers // num_loops * loop] for loop in range(1, num_loops)]
    return [1 + max((loop for loop, right in enumerate(row, 1) if not right), default=0) for row in zip(*ends)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One fixed setting, `ls:E-G`, on a traced text: tokens per cost, replayed or estimated."""

    exit_layer: int
    num_speculations: int
    tokens_per_cost: float
    acceptance: float

    @property
    def policy(self) -> str:
        return f"ls:{self.exit_layer}-{self.num_speculations}"


def fixed_settings(trace: AgreementTrace, cost: CostModel, lengths: Sequence[int] = GRID_LENGTHS) -> list[Setting]:
    """List every recorded exit layer with every length, best first; estimated (DEL eq. 1) where the trace is incomplete."""
    settings = []
    for exit_layer in trace.agrees:
        acceptance = trace.agreement(exit_layer)
        if acceptance is None:
            continue
        for length in lengths:
            if trace.is_complete:
                rounds = replay(trace, exit_layer, length)
                value = rounds.num_tokens / rounds.cost(cost)
            else:
                value = tokens_per_cost(acceptance, exit_layer, length, cost)
            one = Setting(exit_layer=exit_layer, num_speculations=length, tokens_per_cost=value, acceptance=acceptance)
            settings.append(one)
    return sorted(settings, key=lambda setting: -setting.tokens_per_cost)
