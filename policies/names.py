"""Policies by name: `NAME[:ARGS][+STOPPING[:ARGS]]`, in Python and on the command line.

ARGS is a list separated by commas: the exit layer and length first where a policy takes them, then name=value. NAME and
STOPPING may be classes of one's own (`policies.own`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any

from policies.base import ExitPolicy, Policy, StoppingPolicy
from policies.bounds import check_exit_layer
from policies.building import Setup
from policies.cost import CostModel
from policies.del_policy import DelExit, DelThreshold
from policies.fixed import CopyExit, FiniteStateLength, FixedExit, WaveExit
from policies.looped import build_auto
from policies.own import build_own, named_by_packages, own_class
from policies.pacer import PacerStopping
from policies.records import PreVerifier
from policies.spide import SpideStopping
from policies.thresholds import AdaEdlThreshold, DraftVerifyThreshold, SvipThreshold

Convert = Callable[[str], Any]


def _integer(text: str) -> int:
    if not re.fullmatch(r"-?\d+", text):
        raise ValueError(f"a whole number is needed, got {text!r}")
    return int(text)


def _layers(text: str) -> tuple[int, ...]:
    return tuple(_integer(part) for part in text.split("/"))


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError(f"on or off is needed, got {text!r}")
    return text == "on"


def _several(text: str) -> tuple[Any, ...]:
    return tuple(map(_as_it_looks, text.split("/")))


def _as_it_looks(text: str) -> Any:
    if "/" in text:
        return _several(text)
    for read in (_integer, float, _switch):
        with suppress(ValueError):
            return read(text)
    return text


_CONVERT: dict[str, Convert] = {
    **dict.fromkeys(("as", "bins", "cost", "length"), str),
    **dict.fromkeys(("omega", "start", "target", "step", "threshold", "tau", "t", "rho"), float),
    **dict.fromkeys(("copy", "bits"), _switch),
    **dict.fromkeys(("min", "d_max", "max_length", "exit_layer", "layer", "b", "loop"), _integer),
    "layers": _layers,
}
"""How the value of each option is read. An option means the same wherever it occurs."""
_BY_TYPE: dict[str, Convert] = {
    **{"int": _integer, "float": float, "str": str, "bool": _switch},
    **dict.fromkeys(("tuple", "list", "Sequence"), _several),
}
"""Functions that read the arguments of a user's own class, by their annotated type."""

_POSITIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "E-G": ("an exit layer and a length", ("exit_layer", "length")),
    "B-G": ("a number of bits and a length", ("bits", "length")),
    "G": ("a length", ("length",)),
    "PATH": ("a folder", ()),
}
"""What may come first in ARGS: how a message calls it, and the arguments that its numbers are."""


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """One name: what it builds, and what its ARGS may be.

    example: for messages. build: given a Setup and ARGS as keywords. takes: the names of its options, separated by blanks.
    position: what comes first in ARGS, a key of `_POSITIONS`, in brackets if it may be left out; "" for nothing. own: the
    options of a class of one's own, with how their values are read.
    """

    example: str
    build: Callable[..., Any]
    takes: str = ""
    position: str = ""
    own: Mapping[str, Convert] | None = None

    @property
    def options(self) -> Mapping[str, Convert]:
        """How the value of each of its options is read."""
        return {option: _CONVERT[option] for option in self.takes.split()} if self.own is None else self.own


EXITS = {
    "ar": PolicySpec("ar", FixedExit.from_args),
    "copy": PolicySpec("copy:10", CopyExit.from_args, "min", "[G]"),
    "ls": PolicySpec("ls:3-6", FixedExit.from_args, position="E-G"),
    "bits": PolicySpec("bits:8-5", FixedExit.from_args, "layer", "B-G"),
    "wave": PolicySpec("wave:loop=1", WaveExit.from_args, "loop"),
    "del": PolicySpec("del:as=printed", DelExit.from_args, "as cost layers d_max omega length"),
    "auto": PolicySpec("auto:cost=layers", build_auto, "cost layers d_max copy bits"),
}
"""Policies that choose the exit layer."""

STOPPINGS = {
    "fs": PolicySpec("fs:3-6", FiniteStateLength.from_args, position="[G]"),
    "dv": PolicySpec("dv:3", DraftVerifyThreshold.from_args, "start target step max_length"),
    "svip": PolicySpec("svip:3,threshold=0.6", SvipThreshold.from_args, "threshold max_length"),
    "adaedl": PolicySpec("adaedl:3", AdaEdlThreshold.from_args, "start max_length"),
    "spide": PolicySpec("spide:3,tau=0.7", SpideStopping.from_args, "tau max_length bins"),
    "pacer": PolicySpec("pacer:FOLDER,t=0.7", PacerStopping.from_args, "exit_layer b t rho max_length", "[PATH]"),
    "del": PolicySpec("ls:3-18+del", DelThreshold.from_args, "as omega"),
}
"""Policies that end a draft. Alone they take an exit layer first ("dv:3"); "pacer" knows its own, "del" cannot be alone."""
_NEED_FULL_EXITS = ("pacer", "del")


def parse_policy(
    text: str,
    *,
    num_layers: int,
    num_loops: int = 1,
    measure: Callable[[], CostModel] | None = None,
    preverifier: Callable[[str | None], PreVerifier] | None = None,
    draft_bits: tuple[int, ...] = (),
    offered_bits: tuple[int, ...] = (),
) -> Policy:
    """Build a policy from its name.

    num_loops: how often the model runs its layers, which num_layers counts each time.
    measure: called for cost=measured, which is "auto"'s default. preverifier: called for "pacer", with the path given there
    or None for the one in the checkpoint's folder. The generator passes what is known of its costs, and its loader.
    draft_bits: in which there are weights to draft with, for "auto"; offered_bits: in which they are made once it plans to
    draft with them.
    Raises ValueError, one line that names what is possible, for an unknown name or option, a value that does not fit, and an
    option that would change nothing.
    """
    setup = Setup(
        num_layers=num_layers,
        num_loops=num_loops,
        measure=measure,
        preverifier=preverifier,
        draft_bits=draft_bits,
        offered_bits=offered_bits,
    )
    text = text.strip()
    try:
        exit_policy, stopping = _parse(setup, text)
        return Policy(exit_policy, stopping, name=text)
    except ValueError as error:
        raise ValueError(f"policy {text!r}: {error}") from None


def runs_own_code(text: str) -> bool:
    """Tell, without running it, whether `parse_policy` would run code that this package did not bring."""
    names = {_split(part)[0] for part in text.partition("+")[::2]} - {*EXITS, *STOPPINGS, ""}
    return any(".py" in name or name in named_by_packages() for name in names)


def _parse(setup: Setup, text: str) -> tuple[ExitPolicy, StoppingPolicy | None]:
    head, plus, tail = text.partition("+")
    name, arguments = _split(head)
    spec = _find(name, EXITS, "plan")
    if spec is not None:
        if not plus:
            built = spec.build(setup, **_values(name, spec, arguments))
            make_stopping = getattr(built, "default_stopping", None)
            return built, None if make_stopping is None else make_stopping()
        if name == "copy":
            raise ValueError(
                f"copies no longer go before another policy: say {head} alone, or auto, which copies and drafts"
            )
        return _with_other_stopping(setup, name, spec, _values(name, spec, arguments), tail)
    if _find(name, STOPPINGS, "stop_before_draw") is None:
        raise ValueError(f"unknown policy {name!r}{_suggestion(name, list({**EXITS, **STOPPINGS}))}")
    if plus or name not in STOPPINGS:
        raise ValueError(f"{name!r} ends drafts itself: put it after an exit policy, as in ls:3-18+{tail or name}")
    return _with_fixed_exit(setup, name, arguments)


def _find(name: str, built_in: Mapping[str, PolicySpec], method: str) -> PolicySpec | None:
    """Find what a name means: a policy of this package, or a class of one's own with this method."""
    if name in EXITS or name in STOPPINGS:
        return built_in.get(name)
    found = own_class(name)
    if found is None or not hasattr(found, method):
        return None
    own = {}
    makers = (found, getattr(found, "from_args", found))  # the second may hand its options on to the first
    for one in chain.from_iterable(signature(maker).parameters.values() for maker in makers):
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and one.name != "setup":
            types = re.findall(r"\w+", str(one.annotation))
            own[one.name] = next((_BY_TYPE[kind] for kind in types if kind in _BY_TYPE), _as_it_looks)
    return PolicySpec(name, partial(build_own, found), own=own)


def _with_other_stopping(
    setup: Setup, name: str, spec: PolicySpec, values: dict[str, Any], tail: str
) -> tuple[ExitPolicy, StoppingPolicy]:
    """Make an exit policy with another stopping policy, which learns the layers that the exit policy may choose."""
    other, other_arguments = _split(tail)
    other_spec = _find(other, STOPPINGS, "stop_before_draw")
    if other_spec is None:
        raise ValueError(f"unknown stopping policy {other!r}{_suggestion(other, [*STOPPINGS])}")
    other_values = _values(other, other_spec, other_arguments)
    if name == "bits" and other in _NEED_FULL_EXITS:
        others = ", ".join(known for known in STOPPINGS if known not in _NEED_FULL_EXITS)
        raise ValueError(f"{other!r} learns from exits in full: after 'bits' take {others}")
    if name == "auto":
        if "bits" in values:
            raise ValueError(f"bits= changes nothing before +{other}: drafts that it ends are made by exits in full")
        values["bits"] = False
    stopping: StoppingPolicy | None = None
    if other == "pacer":  # it says which layers may be chosen, not the other way round
        if "exit_layer" in other_values:
            raise ValueError(f"exit_layer= changes nothing after {name!r}, which chooses the exit layer")
        stopping = other_spec.build(setup, **other_values)
        assert isinstance(stopping, PacerStopping)
        setup = replace(setup, ended_by=stopping.preverifier, block=stopping.b)
        if "layers" in spec.options:
            values.setdefault("layers", stopping.exit_layers)
        _check_judged(values.get("layers", (values.get("exit_layer"),)), stopping)
    built = spec.build(setup, **values)
    if built.exit_layers == ():
        raise ValueError(f"{name!r} drafts nothing here that could be ended: no stopping policy can follow it")
    if stopping is None:
        drafts_in = built.observes.bits[0] if name == "bits" else None
        setup = replace(setup, exit_layers=built.exit_layers, drafts_in=drafts_in)
        stopping = other_spec.build(setup, **other_values)
    return built, stopping


def _check_judged(layers: tuple[int | None, ...], stopping: PacerStopping) -> None:
    """Raise ValueError unless the pre-verifier knows all of these exit layers."""
    if not set(layers) <= set(stopping.exit_layers):
        raise ValueError(f"the pre-verifier judges exit layers {', '.join(map(str, stopping.exit_layers))} only")


def _with_fixed_exit(setup: Setup, name: str, arguments: str) -> tuple[ExitPolicy, StoppingPolicy]:
    """Make a stopping policy after a fixed exit layer, which comes first: "dv:3", "fs:3-6"; "pacer" knows its own."""
    if name == "pacer":
        values = _values(name, STOPPINGS[name], arguments)
        stopped = PacerStopping.from_args(setup, **values)
        known = int(stopped.preverifier.defaults.get("exit_layer", stopped.exit_layers[0]))
        exit_layer = values.get("exit_layer", known)
        _check_judged((exit_layer,), stopped)
        return FixedExit(exit_layer, stopped.max_length, num_layers=setup.num_layers), stopped
    first, _, rest = arguments.partition(",")
    pattern = r"(\d+)-(\d+)" if name == "fs" else r"(\d+)"
    match = re.fullmatch(pattern, first)
    if match is None or name == "del":
        raise ValueError(f"{name!r} needs an exit layer first, as in {STOPPINGS[name].example}")
    exit_layer = check_exit_layer(int(match[1]), setup.num_layers)
    if name == "fs":
        rest = match[2] + ("," + rest if rest else "")
    values = _values(name, STOPPINGS[name], rest)
    stopping = STOPPINGS[name].build(replace(setup, exit_layers=(exit_layer,)), **values)
    return FixedExit(exit_layer, stopping.max_length, num_layers=setup.num_layers), stopping


def _split(part: str) -> tuple[str, str]:
    """Split a part into its name, which may be FILE.py:CLASS, and its ARGS."""
    name, _, arguments = part.strip().partition(":")
    if name.endswith(".py"):
        wanted, _, arguments = arguments.partition(":")
        name = f"{name}:{wanted}"
    return name, arguments


def _values(name: str, spec: PolicySpec, arguments: str) -> dict[str, Any]:
    """ARGS as keyword arguments. Raises ValueError for what the name does not take."""
    parts = [part.strip() for part in arguments.split(",")] if arguments else []
    values: dict[str, Any] = {}
    position, options = spec.position.strip("[]"), spec.options
    if position:
        called, keys = _POSITIONS[position]
        if parts and "=" not in parts[0]:
            first = parts.pop(0)
            if position == "PATH":
                values["path"] = first
            elif match := re.fullmatch("-".join([r"(\d+)"] * len(keys)), first):
                values.update(zip(keys, map(int, match.groups())))
            else:
                raise ValueError(f"{name!r} takes {called} first, as in {spec.example}, not {first!r}")
        elif spec.position == position:
            raise ValueError(f"{name!r} needs {called} first, as in {spec.example}")
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or key not in options:
            takes = ", ".join(f"{option}=" for option in options) or "no further arguments"
            raise ValueError(f"{name!r} takes {takes}, not {part!r}")
        if key in values:
            raise ValueError(f"{key}= is given twice")
        try:
            values[key] = options[key](value)
        except ValueError as error:
            raise ValueError(f"{key}={value}: {error}") from None
    return values


def _suggestion(name: str, known: list[str]) -> str:
    """Write the end of a message about an unknown name: the closest known ones, or all of them, by name only."""
    close = get_close_matches(name.lower(), known, n=2, cutoff=0.6)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; known are {', '.join(known)} (docs/policies.md describes them)"
