"""What a checkpoint's `quantization_config` says of the numbers in its files, module by module.

Shapes alone do not say everything: 96 inputs with two scales of GPTQ may be groups of 48, or of 64 of which the last is half
full. So what is said is compared with the tensors (`packed_weights`), and where the two disagree a checkpoint is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ORIGINAL = 'load the checkpoint that it was made from; dtype="int8" rounds that one to 8 bits here'
"""What to do where a quantised checkpoint cannot be read."""
_PATTERN = "re:"
_STRATEGIES = ("tensor", "channel", "group")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How the weight of one module is said to be stored; None for what is not said.

    first_version: of GPTQ, whose zero points are then stored with 1 subtracted. bits: of each. strategy: what has a scale
    of its own, the "tensor", each "channel" (an output), or each "group" of an output's inputs. group_size: inputs of a
    group. reordered: whether groups have inputs in an order that only the file can tell. shape: (out, in) of the matrix.
    has_zeros: whether there are zero points beside the scales.
    """

    first_version: bool = True
    bits: int | None = None
    strategy: str | None = None
    group_size: int | None = None
    reordered: bool = False
    has_zeros: bool = False
    shape: tuple[int, ...] | None = None

    def num_groups(self, columns: int) -> int | None:
        """Scales of each output; None if that is not said."""
        if self.strategy in ("tensor", "channel"):
            return 1
        return None if self.group_size is None else -(-columns // self.group_size)


SchemeOf = Callable[[str], Scheme]
"""scheme_of(module), by the module's name in the checkpoint."""
NOTHING_SAID = Scheme()


def schemes_of(settings: Mapping[str, Any]) -> SchemeOf:
    """Of a `quantization_config` that `quantised.check_quantisation` has let pass; others raise errors of any kind."""
    if str(settings["quant_method"]).lower() == "gptq":
        found = _gptq_scheme(settings)
        return lambda module: found
    groups = [
        (tuple(map(str, group.get("targets") or ())), _compressed_tensors_scheme(group.get("weights") or {}))
        for group in (settings.get("config_groups") or {}).values()
    ]
    for target in (target for targets, _ in groups for target in targets if target.startswith(_PATTERN)):
        re.compile(target.removeprefix(_PATTERN))
    if len({scheme for _, scheme in groups}) == 1:
        return lambda module: groups[0][1]
    return lambda module: next(
        (scheme for matches in _MATCHES for targets, scheme in groups if any(matches(t, module) for t in targets)),
        NOTHING_SAID,
    )


_MATCHES: tuple[Callable[[str, str], bool], ...] = (  # the most exact first, as compressed-tensors looks for them
    lambda target, module: target == module,
    lambda target, module: target.startswith(_PATTERN) and re.match(target.removeprefix(_PATTERN), module) is not None,
    lambda target, module: target == "Linear",
)


def gptq_format(settings: Mapping[str, Any]) -> str:
    """The layout of GPTQ's tensors: "gptq" is the first version."""
    named = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    return "marlin" if settings.get("is_marlin_format") else str(named)


def strategy_of(weights: Mapping[str, Any]) -> str | None:
    """What has a scale of its own, of a group of compressed-tensors; None if that is not said."""
    said = weights.get("strategy")
    if said is not None:
        return str(said)
    return _strategy_by_size(weights)


def _strategy_by_size(settings: Mapping[str, Any]) -> str | None:
    """Of a group's size: -1 means all inputs of an output."""
    size = settings.get("group_size")
    return None if size is None else "group" if size > 0 else "channel"


def is_known(strategy: str | None) -> bool:
    """Whether such scales are read."""
    return strategy is None or strategy in _STRATEGIES


def _gptq_scheme(settings: Mapping[str, Any]) -> Scheme:
    first_version = gptq_format(settings) != "gptq_v2"
    if settings.get("dynamic"):  # modules may have bits and groups of their own
        return Scheme(first_version=first_version)
    strategy = _strategy_by_size(settings)
    return Scheme(
        first_version=first_version,
        bits=settings.get("bits"),
        strategy=strategy,
        group_size=settings["group_size"] if strategy == "group" else None,
        reordered=bool(settings.get("desc_act")),
    )


def _compressed_tensors_scheme(weights: Mapping[str, Any]) -> Scheme:
    strategy = strategy_of(weights)
    return Scheme(
        bits=weights.get("num_bits"),
        strategy=strategy,
        group_size=weights.get("group_size") if strategy == "group" else None,
        has_zeros=weights.get("symmetric") is False,
        reordered=weights.get("actorder") in (True, "group"),
    )
