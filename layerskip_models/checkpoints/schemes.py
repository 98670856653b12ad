"""What a checkpoint's `quantization_config` says of the numbers in its files, module by module; or why it is not read.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How the weight of one module is said to be stored; None for what is not said.

    first_version: of GPTQ, whose zero points are then stored with 1 subtracted. bits: of each. strategy: what has a scale
    of its own, the "tensor", each "channel" (an output), or each "group" of an output's inputs. group_size: inputs of a
    group. reordered: whether groups have inputs in an order that only the file can tell. shape: (out, in) of the matrix.
    has_zeros: whether there are zero points as well as scales.
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
    """Read the schemes of a `quantization_config`. Raises ValueError that says why it is not read ("its format is ..").

    Values of other types than are meant may raise any other error.
    """
    method = str(settings.get("quant_method", "an unknown method")).lower()
    if method == "gptq":
        scheme = _gptq_scheme(settings)
        return lambda module: scheme
    if method == "compressed-tensors":
        return _compressed_tensors_schemes(settings)
    raise ValueError(f"its weights are quantised by {method}")


def _gptq_scheme(settings: Mapping[str, Any]) -> Scheme:
    version = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if settings.get("is_marlin_format"):
        version = "marlin"
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"its GPTQ weights are laid out for {version}")
    if settings.get("rotation"):
        raise ValueError(f"its weights are rotated ({settings['rotation']})")
    if settings.get("pack_dtype", "int32") != "int32":
        raise ValueError(f"its GPTQ weights are packed in {settings['pack_dtype']}")
    if (bits := settings.get("bits")) not in (4, 8):
        raise ValueError(f"its GPTQ weights are of {bits} bits")
    if not isinstance(settings.get("group_size", -1), int):
        raise ValueError(f"its group_size is {settings['group_size']!r}")
    strategy, size = _strategy_and_size(None, settings.get("group_size"))
    first_version = version != "gptq_v2"
    if settings.get("dynamic"):  # modules may have bits and groups of their own
        return Scheme(first_version=first_version)
    return Scheme(
        first_version=first_version,
        bits=bits,
        strategy=strategy,
        group_size=size,
        reordered=bool(settings.get("desc_act")),
    )


def _compressed_tensors_schemes(settings: Mapping[str, Any]) -> SchemeOf:
    named = settings.get("config_groups") or {}
    if not isinstance(named, Mapping) or not all(isinstance(group, Mapping) for group in named.values()):
        raise ValueError("its config_groups are not groups")
    named_formats = (settings.get("format"), *(group.get("format") for group in named.values()))
    formats = {str(found) for found in named_formats if found not in (None, "mixed-precision")}
    if unread := sorted(formats - {"pack-quantized", "int-quantized", "dense"}):
        raise ValueError(f"its format is {', '.join(unread)}")
    if (sparsity := (settings.get("sparsity_config") or {}).get("format", "dense")) != "dense":
        raise ValueError(f"its weights are stored sparse ({sparsity})")
    if settings.get("kv_cache_scheme"):
        raise ValueError("it was made for a quantised KV cache (kv_cache_scheme)")
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise ValueError("its weights are rotated at run time (transform_config)")
    groups = [(tuple(map(str, group.get("targets") or ())), _scheme_of_group(group)) for group in named.values()]
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


def _scheme_of_group(group: Mapping[str, Any]) -> Scheme:
    """Return the scheme of one of compressed-tensors' `config_groups`."""
    weights = group.get("weights") or {}
    if group.get("input_activations") or group.get("output_activations"):
        raise ValueError(
            "its activations are quantised as well (W8A8 and the like), and without that it is another model"
        )
    if weights.get("type", "int") != "int" or weights.get("num_bits", 8) not in (4, 8):
        raise ValueError(f"its weights are of {weights.get('num_bits')} bits, type {weights.get('type')}")
    strategy, size = _strategy_and_size(weights.get("strategy"), weights.get("group_size"))
    if strategy not in (None, "tensor", "channel", "group"):
        raise ValueError(f"its weights have scales by {strategy}")
    if weights.get("block_structure"):
        raise ValueError(f"its weights have scales by block ({weights['block_structure']})")
    return Scheme(
        bits=weights.get("num_bits"),
        strategy=strategy,
        group_size=size,
        has_zeros=weights.get("symmetric") is False,
        reordered=weights.get("actorder") in (True, "group"),
    )


def _strategy_and_size(strategy: str | None, size: Any) -> tuple[str | None, int | None]:
    """Tell what has its own scale: by name, or else by the size of a group, where -1 means all inputs of an output."""
    if size is not None and not isinstance(size, int):
        raise ValueError(f"its group_size is {size!r}")
    if strategy is None and size is not None:
        strategy = "group" if size > 0 else "channel"
    return strategy, size if strategy == "group" else None
