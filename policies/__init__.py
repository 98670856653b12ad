"""Policies: which layer to exit at, and when to stop drafting.

`parse_policy("ls:3-6", num_layers=16)` builds one from its name. `POLICIES` is the whole list; nothing is discovered or
registered.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from policies.base import (
    DraftRow,
    ExitPolicy,
    Needs,
    Plan,
    Policy,
    RoundContext,
    RoundRecord,
    ShadowTokens,
    StoppingPolicy,
    check_exit_layer,
)
from policies.fixed import FixedExit

__all__ = [
    "POLICIES",
    "DraftRow",
    "ExitPolicy",
    "FixedExit",
    "Needs",
    "Plan",
    "Policy",
    "RoundContext",
    "RoundRecord",
    "ShadowTokens",
    "StoppingPolicy",
    "autoregressive",
    "check_exit_layer",
    "parse_policy",
]


def autoregressive(num_layers: int) -> Policy:
    """Plain decoding: one token per pass through all layers."""
    return Policy(FixedExit(None, 0, num_layers=num_layers), name="ar")


def _parse_autoregressive(arguments: str, num_layers: int) -> Policy:
    if arguments:
        raise ValueError(f'"ar" takes no arguments, got {arguments!r}')
    return autoregressive(num_layers)


def _parse_fixed(arguments: str, num_layers: int) -> Policy:
    match = re.fullmatch(r"(\d+)-(\d+)", arguments)
    if match is None:
        raise ValueError(
            f'"ls" takes an exit layer and a length, as in "ls:3-6" (exit after 3 layers, draft 6), got {arguments!r}'
        )
    exit_layer, num_speculations = int(match[1]), int(match[2])
    name = f"ls:{exit_layer}-{num_speculations}"
    return Policy(FixedExit(exit_layer, num_speculations, num_layers=num_layers), name=name)


POLICIES: dict[str, Callable[[str, int], Policy]] = {
    "ar": _parse_autoregressive,
    "ls": _parse_fixed,
}


def parse_policy(text: str, *, num_layers: int) -> Policy:
    """Build a policy from its name, `NAME[:ARGS]`: "ar" or "ls:E-GAMMA".

    Raises ValueError that lists what is possible when the name is unknown or an argument does not fit the model.
    """
    name, _, arguments = text.strip().partition(":")
    if name not in POLICIES:
        raise ValueError(f'unknown policy {text!r}: possible are "ar" (plain decoding) and "ls:E-GAMMA", e.g. "ls:3-6"')
    return POLICIES[name](arguments, num_layers)
