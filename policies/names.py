"""Policies by name: `NAME[:ARGS][+STOPPING[:ARGS]]`, in Python and on the command line.

ARGS is a list separated by commas: the exit layer and length first where a policy takes them, then name=value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from policies.auto.policy import AutoExit
from policies.base import ExitPolicy, Policy, StoppingPolicy
from policies.bounds import check_exit_layer
from policies.building import Setup
from policies.copying import CopyExit
from policies.cost import CostModel
from policies.del_policy import DelExit, DelThreshold
from policies.draft_verify import DraftVerifyThreshold
from policies.entropy import AdaEdlThreshold, SvipThreshold
from policies.finite_state import FiniteStateLength
from policies.fixed import FewBits, FixedExit
from policies.pacer import PacerStopping
from policies.records import ObservationSpec, PreVerifier
from policies.spide import SpideStopping

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


_CONVERT: dict[str, Convert] = {
    **dict.fromkeys(("cost", "length", "on_stop", "state", "prompt", "bins", "criterion", "scope", "alpha"), str),
    **dict.fromkeys(("omega", "decay", "start", "target", "step", "threshold", "tau", "t", "rho"), float),
    **dict.fromkeys(("no_speculation", "copy", "bits", "shadow"), _switch),
    **dict.fromkeys(
        ("min", "d_max", "max_length", "prompt_rows", "learn_every", "learn_first", "exit_layer", "layer", "b"),
        _integer,
    ),
    "layers": _layers,
}
"""How the value of each option is read. An option means the same wherever it occurs."""

_POSITIONS = {
    "E-G": "an exit layer and a length",
    "B-G": "a number of bits and a length",
    "G": "a length",
    "PATH": "a folder",
}
_PAIRS = {"E-G": ("exit_layer", "length"), "B-G": ("bits", "length")}


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """One name: what it builds, and what its ARGS may be.

    build: given a Setup and ARGS as keywords. takes: the names of its options, separated by blanks.
    position: what comes first in ARGS, a key of `_POSITIONS`, in brackets if it may be left out; "" for nothing.
    default_stopping: makes the stopping policy that an exit policy comes with, if any.
    """

    about: str
    example: str
    build: Callable[..., Any]
    takes: str = ""
    position: str = ""
    default_stopping: Callable[..., StoppingPolicy | None] | None = None

    @property
    def options(self) -> dict[str, Convert]:
        """How the value of each of its options is read."""
        return {option: _CONVERT[option] for option in self.takes.split()}


EXITS = {
    "ar": PolicySpec("plain decoding", "ar", FixedExit.from_args),
    "copy": PolicySpec(
        "what followed the same words earlier",
        "copy:10",
        CopyExit.from_args,
        "min",
        position="[G]",
    ),
    "ls": PolicySpec("fixed exit layer and length", "ls:3-6", FixedExit.from_args, position="E-G"),
    "bits": PolicySpec(
        "drafts with the model's weights in 8 or 4 bits", "bits:8-5", FewBits.from_args, "layer", position="B-G"
    ),
    "del": PolicySpec(
        "DEL: exit layer by tokens per layer, dynamic threshold",
        "del:on_stop=keep",
        DelExit.from_args,
        "cost layers d_max omega length no_speculation on_stop state prompt alpha",
        default_stopping=DelExit.default_stopping,
    ),
    "auto": PolicySpec(
        "exit layer and length by tokens per cost",
        "auto:cost=layers",
        AutoExit.from_args,
        "cost layers d_max decay prompt_rows learn_every learn_first copy bits",
        default_stopping=AutoExit.default_stopping,
    ),
}
"""Policies that choose the exit layer."""

STOPPINGS = {
    "fs": PolicySpec("finite-state length", "fs:3-6", FiniteStateLength.from_args, position="[G]"),
    "dv": PolicySpec(
        "Draft&Verify's threshold", "dv:3", DraftVerifyThreshold.from_args, "start target step max_length"
    ),
    "svip": PolicySpec("SVIP's entropy bound", "svip:3,threshold=0.6", SvipThreshold.from_args, "threshold max_length"),
    "adaedl": PolicySpec("AdaEDL's entropy bound", "adaedl:3", AdaEdlThreshold.from_args, "start max_length"),
    "spide": PolicySpec(
        "SPIDE's reliability",
        "spide:3,tau=0.7",
        SpideStopping.from_args,
        "tau max_length learn_every shadow prompt_rows bins",
    ),
    "pacer": PolicySpec(
        "Pacer's pre-verifier",
        "pacer:FOLDER,t=0.7",
        PacerStopping.from_args,
        "exit_layer b t rho criterion scope max_length",
        position="[PATH]",
    ),
    "del": PolicySpec("DEL's dynamic threshold", "ls:3-18+del", DelThreshold.from_args, "on_stop omega state prompt"),
}
"""Policies that end a draft. Alone, all but "del" take a fixed exit layer first ("dv:3")."""
_OF_EXITS = frozenset({"del", "pacer"})
_ANY_DRAFT = [name for name in STOPPINGS if name not in _OF_EXITS]


def parse_policy(
    text: str,
    *,
    num_layers: int,
    measure: Callable[[], CostModel] | None = None,
    preverifier: Callable[[str | None], PreVerifier] | None = None,
    draft_bits: tuple[int, ...] = (),
    offered_bits: tuple[int, ...] = (),
) -> Policy:
    """Build a policy from its name.

    measure: called for cost=measured, which is "auto"'s default. preverifier: called for "pacer", with the path given there
    or None for the one in the checkpoint's folder. The generator passes its calibration and its loader. draft_bits: in which
    there are weights to draft with, for "auto"; offered_bits: in which they are made once it plans to draft with them.
    Raises ValueError, one line that names what is possible, for an unknown name or option, a value that does not fit, and an
    option that would change nothing.
    """
    setup = Setup(
        num_layers=num_layers,
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


def kept_between_texts(text: str) -> str:
    """Add state=kept wherever the policy has that option and the name does not say: "del" becomes "del:state=kept"."""
    parts = []
    for part, known in zip(text.strip().split("+"), (EXITS, STOPPINGS)):
        name, arguments = _split(part)
        if name in known and "state" in known[name].options and "state=" not in arguments:
            part = f"{name}:{arguments},state=kept" if arguments else f"{name}:state=kept"
        parts.append(part)
    return "+".join(parts)


def _parse(setup: Setup, text: str) -> tuple[ExitPolicy, StoppingPolicy | None]:
    head, plus, tail = text.partition("+")
    name, arguments = _split(head)
    if name in EXITS:
        if not plus:
            return _with_default_stopping(setup, name, arguments)
        if name == "copy":
            raise ValueError(
                f"copies no longer go before another policy: say {head} alone, or auto, which copies and drafts"
            )
        return _with_other_stopping(setup, name, arguments, tail)
    if name not in STOPPINGS:
        raise ValueError(f"unknown policy {name!r}{_suggestion(name, list({**EXITS, **STOPPINGS}))}")
    if plus:
        raise ValueError(f"{name!r} ends drafts itself: put {tail!r} after an exit policy, as in ls:3-18+{tail}")
    return _with_fixed_exit(setup, name, arguments)


def _with_default_stopping(setup: Setup, name: str, arguments: str) -> tuple[ExitPolicy, StoppingPolicy | None]:
    """Make an exit policy with the stopping policy that it comes with, if any."""
    values = _values(name, EXITS[name], arguments)
    if "on_stop" in values and values.get("length") == "tpl":
        raise ValueError("on_stop= changes nothing with length=tpl, which drafts without a threshold")
    own = {"on_stop": values.pop("on_stop")} if "on_stop" in values else {}
    built = EXITS[name].build(setup, **values)
    _check_schedule(values, built.observes, ObservationSpec(), "")
    stopping = EXITS[name].default_stopping
    return built, None if stopping is None else stopping(built, **own)


def _with_other_stopping(setup: Setup, name: str, arguments: str, tail: str) -> tuple[ExitPolicy, StoppingPolicy]:
    """Make an exit policy with another stopping policy, which learns the layers that the exit policy may choose."""
    other, other_arguments = _split(tail)
    if other not in STOPPINGS:
        raise ValueError(f"unknown stopping policy {other!r}{_suggestion(other, [*STOPPINGS])}")
    values = _values(name, EXITS[name], arguments)
    other_values = _values(other, STOPPINGS[other], other_arguments)
    if name == "bits" and other in _OF_EXITS:
        raise ValueError(f"{other!r} learns from exits in full: after 'bits' take {', '.join(_ANY_DRAFT)}")
    if name == "bits" and other == "spide" and {"shadow", "learn_every", "prompt_rows"} & other_values.keys():
        raise ValueError(
            "after 'bits' spide learns from drafts alone: leave out shadow=, learn_every= and prompt_rows="
        )
    if name == "auto":
        if "bits" in values:
            raise ValueError(f"bits= changes nothing before +{other}: drafts that it ends are made by exits in full")
        values["bits"] = False
    if "on_stop" in values:
        raise ValueError(f"on_stop= changes nothing before +{other}, which ends the drafts instead")
    stopping: StoppingPolicy | None = None
    if other == "pacer":  # it says which layers may be chosen, not the other way round
        if "exit_layer" in other_values:
            raise ValueError(f"exit_layer= changes nothing after {name!r}, which chooses the exit layer")
        stopping = STOPPINGS[other].build(setup, **other_values)
        assert isinstance(stopping, PacerStopping)
        setup = replace(setup, ended_by=stopping.preverifier, block=stopping.b)
        _keep_to_layers(values, stopping.exit_layers, "layers" in EXITS[name].options)
    built = EXITS[name].build(setup, **values)
    if built.exit_layers == ():
        raise ValueError(f"{name!r} drafts nothing here: no stopping policy can follow it")
    if stopping is None:
        drafts_in = built.observes.bits[0] if name == "bits" else None
        setup = replace(setup, exit_layers=built.exit_layers, drafts_in=drafts_in)
        stopping = STOPPINGS[other].build(setup, **other_values)
    _check_schedule(values, built.observes, stopping.observes, f"before +{other}")
    _check_schedule(other_values, stopping.observes, built.observes, f"after {name!r}")
    return built, stopping


def _check_schedule(values: dict[str, Any], own: ObservationSpec, other: ObservationSpec, where: str) -> None:
    """ValueError for a schedule of learning that the other half of the policy, which asks for more, overrides."""
    if "learn_every" in values and other.shadow_layers and 0 < other.learn_every < own.learn_every:
        rows = "every row" if other.learn_every == 1 else f"one row in {other.learn_every}"
        raise ValueError(f"learn_every= changes nothing {where}, which learns from {rows}")
    if "prompt_rows" in values and other.prompt_rows > own.prompt_rows:
        raise ValueError(f"prompt_rows= changes nothing {where}, which learns from {other.prompt_rows} of them")
    if "learn_first" in values and (own | other).learn_every == 1:
        raise ValueError("learn_first= changes nothing where every row is learned from")


def _keep_to_layers(values: dict[str, Any], layers: tuple[int, ...], chooses: bool) -> None:
    """Let an exit policy plan with exit layers that the pre-verifier knows, and no others."""
    if chooses:
        values.setdefault("layers", layers)
    asked = values.get("layers", (values.get("exit_layer"),))
    if not set(asked) <= set(layers):
        raise ValueError(f"the pre-verifier judges exit layers {', '.join(map(str, layers))} only")


def _with_fixed_exit(setup: Setup, name: str, arguments: str) -> tuple[ExitPolicy, StoppingPolicy]:
    """Make a stopping policy after a fixed exit layer, which comes first: "dv:3", "fs:3-6"; "pacer" knows its own."""
    if name == "pacer":
        values = _values(name, STOPPINGS[name], arguments)
        stopped = PacerStopping.from_args(setup, **values)
        assert isinstance(stopped, PacerStopping)
        known = int(stopped.preverifier.defaults.get("exit_layer", stopped.exit_layers[0]))
        chosen = {"exit_layer": values.get("exit_layer", known)}
        _keep_to_layers(chosen, stopped.exit_layers, chooses=False)
        return FixedExit(chosen["exit_layer"], stopped.max_length, num_layers=setup.num_layers), stopped
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
    cap = stopping.max_length
    return FixedExit(exit_layer, cap, num_layers=setup.num_layers), stopping


def _split(part: str) -> tuple[str, str]:
    name, _, arguments = part.strip().partition(":")
    return name, arguments


def _values(name: str, named: PolicySpec, arguments: str) -> dict[str, Any]:
    """ARGS as keyword arguments. Raises ValueError for what the name does not take."""
    parts = [part.strip() for part in arguments.split(",")] if arguments else []
    values: dict[str, Any] = {}
    position, options = named.position.strip("[]"), named.options
    if position and parts and "=" not in parts[0]:
        values.update(_position(name, position, named.example, parts.pop(0)))
    elif position and named.position == position:
        raise ValueError(f"{name!r} needs {_POSITIONS[position]} first, as in {named.example}")
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


def _position(name: str, position: str, example: str, text: str) -> dict[str, Any]:
    if position == "PATH":
        return {"path": text}
    keys = _PAIRS.get(position, ("length",))
    match = re.fullmatch("-".join([r"(\d+)"] * len(keys)), text)
    if match is None:
        raise ValueError(f"{name!r} takes {_POSITIONS[position]} first, as in {example}, not {text!r}")
    return dict(zip(keys, map(int, match.groups())))


def _suggestion(name: str, known: list[str]) -> str:
    """Write the end of a message about an unknown name: the closest known ones, or all of them, by name only."""
    close = get_close_matches(name.lower(), known, n=2, cutoff=0.6)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; known are {', '.join(known)} (docs/policies.md describes them)"
