"""Policies: which layer to exit at, and when to stop drafting.

`parse_policy("del+spide:tau=0.7", num_layers=16)` builds one from its name; `policies.names` has the whole list, plain
dicts. To write your own, see docs/policies.md.
"""

from __future__ import annotations

from policies.auto.policy import AutoExit
from policies.base import ExitPolicy, NeverStop, Policy, StatelessPolicy, StoppingPolicy
from policies.bounds import check_exit_layer
from policies.cost import CostModel, LayerCost, MeasuredCost, cost_of_round, tokens_per_cost
from policies.del_policy import DelExit
from policies.fixed import CopyExit, FixedExit
from policies.names import parse_policy, runs_own_code
from policies.pacer import PacerStopping
from policies.records import (
    ContextStates,
    Drafter,
    DraftRow,
    ObservationSpec,
    Plan,
    PolicyCost,
    PreVerifier,
    RoundContext,
    RoundRecord,
    Shadow,
    ShadowTokens,
)

__all__ = [
    "AutoExit",
    "ContextStates",
    "CopyExit",
    "CostModel",
    "DelExit",
    "DraftRow",
    "Drafter",
    "ExitPolicy",
    "FixedExit",
    "LayerCost",
    "MeasuredCost",
    "NeverStop",
    "ObservationSpec",
    "PacerStopping",
    "Plan",
    "Policy",
    "PolicyCost",
    "PreVerifier",
    "RoundContext",
    "RoundRecord",
    "Shadow",
    "ShadowTokens",
    "StatelessPolicy",
    "StoppingPolicy",
    "autoregressive",
    "check_exit_layer",
    "cost_of_round",
    "parse_policy",
    "runs_own_code",
    "tokens_per_cost",
]


def autoregressive(num_layers: int) -> Policy:
    """Plain decoding: one token per pass through all layers."""
    return parse_policy("ar", num_layers=num_layers)
