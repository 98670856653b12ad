"""What any fixed setting would do, from one traced run: greedy decoding only.

While drafts are accepted they equal the model's own greedy text, so whether draft j is accepted depends only on whether
layer E's argmax after that text is its next token. One autoregressive run that records every layer's argmax at every
position therefore decides the rounds of every (exit layer, length): exactly, but for near-ties of the arithmetic, with
EOS off (a wrong draft could otherwise be EOS and end a draft early).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from policies import Needs, Plan, Policy, RoundContext, RoundRecord, ShadowTokens
from selfspec import SelfSpecGenerator
from selfspec.stats import ratio


class TraceEveryLayer:
    """An exit policy that never speculates and asks for the shadow tokens of every layer."""

    def __init__(self, num_layers: int) -> None:
        self.needs = Needs(shadow_layers=tuple(range(1, num_layers)))

    def plan(self, context: RoundContext) -> Plan:
        """No speculation."""
        return Plan(exit_layer=None, max_speculations=0)

    def observe_prompt(self, shadow: ShadowTokens) -> None:
        """Nothing to learn."""

    def observe(self, record: RoundRecord) -> None:
        """Nothing to learn: the records are kept in the trace."""

    def reset(self) -> None:
        """Nothing to forget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementTrace:
    """The model's greedy text and where each layer would have said the same.

    tokens: the new ones, N of them. agrees[l-1][i]: layer l's argmax after new token i is new token i+1; i < N-1.
    """

    tokens: tuple[int, ...]
    agrees: tuple[tuple[bool, ...], ...]

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.agrees) + 1

    def agreement(self, exit_layer: int) -> float | None:
        """Share of positions where a layer agrees with the last one; None if there is no position."""
        row = self.agrees[exit_layer - 1]
        return ratio(sum(row), len(row))


def trace_agreement(generator: SelfSpecGenerator, prompt: Tensor, max_new_tokens: int) -> AgreementTrace:
    """Decode autoregressively, EOS off, and record every layer's argmax. prompt: int64 [n]."""
    num_layers = generator.model.num_layers
    result = generator.generate(
        prompt,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=[],
        policy=Policy(TraceEveryLayer(num_layers), name="trace"),
        trace=True,
    )
    assert result.trace is not None
    columns: list[list[bool]] = []
    for record in result.trace:
        assert record.shadow is not None
        columns.append((record.shadow.tokens == record.shadow.target_tokens)[:, 0].tolist())
    return AgreementTrace(
        tokens=tuple(result.new_tokens),
        agrees=tuple(tuple(column[layer] for column in columns) for layer in range(num_layers - 1)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The rounds of one setting on one text. drafted, accepted: per round, 0 and 0 for one without speculation."""

    exit_layer: int
    num_layers: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def rounds(self) -> int:
        """How many."""
        return len(self.drafted)

    @property
    def num_tokens(self) -> int:
        """Tokens committed in rounds: all but the one from prefill."""
        return self.rounds + sum(self.accepted)

    @property
    def loaded_layers(self) -> int:
        """Layers run, weight loads: k * E + L in a round with k drafts, L in one without."""
        return sum(self.drafted) * self.exit_layer + self.rounds * self.num_layers

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted, None if nothing was drafted."""
        return ratio(sum(self.accepted), sum(self.drafted))

    @property
    def tokens_per_round(self) -> float | None:
        """With the target's own token."""
        return ratio(self.num_tokens, self.rounds)

    @property
    def etpl(self) -> float | None:
        """Tokens committed in rounds over layers loaded in rounds (DEL's eTPL)."""
        return ratio(self.num_tokens, self.loaded_layers)


def replay(trace: AgreementTrace, exit_layer: int, num_speculations: int) -> Replay:
    """The rounds that `ls:E-G` would have on the traced text. num_speculations >= 1."""
    agrees = trace.agrees[exit_layer - 1]
    total = len(trace.tokens)
    committed = 1  # the token from prefill
    drafted: list[int] = []
    accepted: list[int] = []
    while committed < total:
        cap = min(num_speculations, total - committed - 1)
        accepted.append(_leading(agrees[committed - 1 : committed - 1 + cap]))
        drafted.append(cap)
        committed += accepted[-1] + 1
    return Replay(exit_layer=exit_layer, num_layers=trace.num_layers, drafted=tuple(drafted), accepted=tuple(accepted))


def _leading(flags: Sequence[bool]) -> int:
    """How many are true before the first that is not."""
    return next((i for i, flag in enumerate(flags) if not flag), len(flags))
