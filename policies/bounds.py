"""Checks of a policy's numbers. Upper bounds limit the memory and time that one round may take, whoever names the policy."""

from __future__ import annotations

from collections.abc import Sequence

MAX_DRAFTS = 64
"""Drafts in a round. Nothing that was measured gains from more than about 20, and memory and time grow with them."""


def check_number(name: str, value: int, least: int, most: int) -> int:
    """Return `value` if it is an integer in [least, most]. Raises ValueError that names it and the range."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} must be an integer in [{least}, {most}], got {_short(value)}")
    return value


def _short(value: object) -> str:
    shown = "an integer of many digits" if isinstance(value, int) and abs(value) > 10**30 else repr(value)
    return shown if len(shown) <= 40 else shown[:40] + "..."


def check_exit_layer(exit_layer: int, num_layers: int) -> int:
    """Return `exit_layer` if a model of `num_layers` layers can exit there; ValueError with the range if not."""
    if isinstance(exit_layer, bool) or not isinstance(exit_layer, int) or not 1 <= exit_layer < num_layers:
        raise ValueError(
            f"exit_layer must be in [1, {num_layers - 1}] for this {num_layers}-layer model, got {exit_layer!r}"
        )
    return exit_layer


def check_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Sorted, distinct exit layers, each checked by `check_exit_layer`."""
    return tuple(sorted({check_exit_layer(layer, num_layers) for layer in layers}))


def check_loop(loop: int, num_loops: int) -> int:
    """Return `loop` if a wave can choose drafts after that many loops of a model; ValueError with the range if not."""
    if num_loops < 2:
        raise ValueError("a wave needs a looped model, which runs the same layers several times: this one has one loop")
    return check_number("loop", loop, 1, num_loops - 1)


def check_draft_layer(exit_layer: int, num_layers: int, bits: int | None) -> int:
    """Check the same of a draft with weights of `bits` bits, which may go through all layers; None: the model's own."""
    if bits is not None and exit_layer == num_layers:
        return exit_layer
    return check_exit_layer(exit_layer, num_layers)
