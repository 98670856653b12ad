"""Whether a model gets a second set of weights to draft with: as the caller says, or where it is likely to pay."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Literal, get_args

import psutil

from layerskip_models import LayerSkipModel
from layerskip_models.draft_weights import draft_bytes, drafter_of, why_no_drafter

DraftWeights = Literal["auto", "none", "int8", "int4"]
"""auto: in 8 bits, once the default policy wants them, if they are read from memory and there is room. none: never. int8,
int4: from the start."""
BITS: dict[str, int] = {"int8": 8, "int4": 4}
_AUTO_BITS = 8
_ROOM = 3
"""Free memory that must be there, in multiples of the weights' size."""
_USUAL_CACHE = 32 << 20
log = logging.getLogger("selfspec")


def check_draft_weights(choice: str) -> DraftWeights:
    """Return the choice. Raises ValueError for anything else than the names."""
    for known in get_args(DraftWeights):
        if choice == known:
            return known
    raise ValueError(f"draft_weights must be one of {', '.join(get_args(DraftWeights))}, got {choice!r}")


def make_draft_weights(model: LayerSkipModel, choice: DraftWeights) -> None:
    """Make what was asked for by name. Raises ValueError where it cannot be made."""
    if choice in BITS:
        drafter_of(model, BITS[choice])


def make_for(model: LayerSkipModel, choice: DraftWeights, policy: str, observed: Iterable[int]) -> None:
    """Make the weights that a policy drafts with. observed: the policy's bits.

    Raises ValueError for what `draft_weights` does not allow, and where it does not run.
    """
    for bits in observed:
        if choice != "auto" and BITS.get(choice) != bits:
            raise ValueError(f"policy {policy!r} drafts in {bits} bits, and draft_weights is {choice!r}")
        drafter_of(model, bits)


def bits_on_offer(model: LayerSkipModel, choice: DraftWeights) -> tuple[int, ...]:
    """In which bits weights to draft with may be made for a policy that has not asked for any yet."""
    if choice != "auto" or model.drafters:
        return ()
    size = draft_bytes(model, _AUTO_BITS)
    if size < _last_cache() or why_no_drafter(model, _AUTO_BITS) is not None or not _is_room_for(size):
        return ()
    return (_AUTO_BITS,)


def make_offered(model: LayerSkipModel, bits: int) -> None:
    """Make the weights that a plan wants to draft with and that are not there; says so in the log, with their size."""
    started = perf_counter()
    drafter_of(model, bits)
    log.info(
        "drafts are made with a copy of the weights in %d bits from now on: %d MB, made in %.1f s",
        bits,
        draft_bytes(model, bits) // 1_000_000,
        perf_counter() - started,
    )


def _is_room_for(size: int) -> bool:
    return int(psutil.virtual_memory().available) >= _ROOM * size


@cache
def _last_cache() -> int:
    """Bytes of the processor's last cache. What fits in it is not read from memory, so fewer bits gain little."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            sizes.append(int(path.read_text().strip().removesuffix("K")) << 10)
        except (OSError, ValueError):
            continue
    return max(sizes, default=_USUAL_CACHE)
