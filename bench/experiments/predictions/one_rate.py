"""Tokens per loaded layer where every draft of an exit is accepted with the same chance p, whatever came before.

A round of k drafts loads k E + L layers and commits 1 + p + ... + p^k tokens on average (docs/how-it-works.md).
"""

from __future__ import annotations

import math

LONGEST = 64  # drafts of a round that are considered


def tokens_of_round(rate: float, length: int) -> float:
    """How many tokens a round of `length` drafts commits on average."""
    return sum(rate**place for place in range(length + 1))


def fixed_length(rate: float, length: int, exit_layer: int, num_layers: int) -> float:
    """Tokens per loaded layer of rounds of `length` drafts."""
    return tokens_of_round(rate, length) / (length * exit_layer + num_layers)


def fitted_rate(etpl: float, length: int, exit_layer: int, num_layers: int) -> float:
    """The rate at which `fixed_length` is this. Raises ValueError for what no rate in [0, 1] gives."""
    low, high = 0.0, 1.0
    if (
        not fixed_length(low, length, exit_layer, num_layers)
        <= etpl
        <= fixed_length(high, length, exit_layer, num_layers)
    ):
        raise ValueError(
            f"no acceptance rate gives {etpl} tokens per layer with {length} drafts of exit layer {exit_layer}"
        )
    for _ in range(60):
        middle = (low + high) / 2
        if fixed_length(middle, length, exit_layer, num_layers) < etpl:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def finite_state(rate: float, exit_layer: int, num_layers: int) -> float:
    """Tokens per loaded layer when the length grows by 1 if all drafts are accepted, and else falls by 1, to at least 1.

    In the long run: a birth-and-death chain over lengths, whose shares follow from the balance of each two neighbours.
    """
    shares = [1.0]
    for length in range(1, LONGEST):
        shares.append(shares[-1] * rate**length / max(1 - rate ** (length + 1), 1e-300))
    tokens = math.fsum(share * tokens_of_round(rate, length) for length, share in enumerate(shares, start=1))
    layers = math.fsum(share * (length * exit_layer + num_layers) for length, share in enumerate(shares, start=1))
    return tokens / layers


def best_fixed_length(rate: float, exit_layer: int, num_layers: int) -> float:
    """The most that any fixed length gives."""
    return max(fixed_length(rate, length, exit_layer, num_layers) for length in range(LONGEST))


def oracle_length(rate: float, exit_layer: int, num_layers: int) -> float:
    """Of rounds that draft just what will be accepted: all that a rule which stops drafts of this exit could reach."""
    accepted = rate / (1 - rate)
    return (accepted + 1) / (accepted * exit_layer + num_layers)
