"""Policies: which layer to exit at, and when to stop drafting.

`parse_policy("del+spide:tau=0.7", num_layers=16)` builds one from its name; `EXITS` and `STOPPINGS` are the whole list, plain
dicts in policies.names. To write your own, see docs/policies.md.
"""

from __future__ import annotations

from policies.acceptance_table import AcceptanceTable
from policies.auto.policy import AutoExit, AutoStopping
from policies.base import ExitPolicy, NeverStop, Policy, StatelessPolicy, StoppingPolicy
from policies.bounds import check_exit_layer
from policies.copying import CopyExit
from policies.cost import CostModel, LayerCost, MeasuredCost, best_setting, cost_of_round, tokens_per_cost
from policies.del_policy import DelExit, DelThreshold
from policies.draft_verify import DraftVerifyThreshold
from policies.entropy import AdaEdlThreshold, SvipThreshold
from policies.finite_state import FiniteStateLength
from policies.fixed import FixedExit
from policies.names import EXITS, STOPPINGS, kept_between_texts, parse_policy
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
from policies.spide import SpideStopping

__all__ = [
    "EXITS",
    "STOPPINGS",
    "AcceptanceTable",
    "AdaEdlThreshold",
    "AutoExit",
    "AutoStopping",
    "ContextStates",
    "CopyExit",
    "CostModel",
    "DelExit",
    "DelThreshold",
    "DraftRow",
    "DraftVerifyThreshold",
    "Drafter",
    "ExitPolicy",
    "FiniteStateLength",
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
    "SpideStopping",
    "StatelessPolicy",
    "StoppingPolicy",
    "SvipThreshold",
    "autoregressive",
    "best_setting",
    "check_exit_layer",
    "cost_of_round",
    "kept_between_texts",
    "parse_policy",
    "tokens_per_cost",
]


def autoregressive(num_layers: int) -> Policy:
    """Plain decoding: one token per pass through all layers."""
    return parse_policy("ar", num_layers=num_layers)
