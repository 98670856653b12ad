"""Policies by name: `NAME[:ARGS][+STOPPING[:ARGS]]`, in Python and on the command line.

ARGS is a list separated by commas: the exit layer and length first where a policy takes them, then name=value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from policies import auto, del_policy, draft_verify, entropy, finite_state, pacer, spide
from policies.base import ExitPolicy, Policy, StoppingPolicy, check_exit_layer
from policies.cost import CostModel, LayerCost, WithPreVerifier
from policies.fixed import FixedExit

COSTS = ("layers", "measured")
Convert = Callable[[str], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a name is resolved for: the model's layers, and how to get its measured cost and a pre-verifier (None: neither can
    be had). block: of the pre-verifier that ends the drafts, if one does; its passes are part of the cost."""

    num_layers: int
    measure: Callable[[], CostModel] | None = None
    preverifier: Callable[[str | None], pacer.PreVerifier] | None = None
    block: int | None = None

    def cost(self, kind: str) -> CostModel:
        """The cost model of a `cost=` option."""
        cost = self._cost(kind)
        return cost if self.block is None else WithPreVerifier(cost, self.block)

    def _cost(self, kind: str) -> CostModel:
        if kind == "layers":
            return LayerCost(self.num_layers)
        if kind != "measured":
            raise ValueError(f"cost must be one of {', '.join(COSTS)}, got {kind!r}")
        if self.measure is None:
            raise ValueError("cost=measured needs measured seconds: pass `measure`, or use cost=layers")
        return self.measure()


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """One name: what its ARGS may be, and what it builds.

    position: what comes first in ARGS, "" for nothing, "E", "E-G" or "G" (exit layer, length). options: name -> converter.
    """

    about: str
    example: str
    build: Callable[..., Any]
    position: str = ""
    position_optional: bool = False
    options: Mapping[str, Convert] = field(default_factory=dict)


def _layers(text: str) -> tuple[int, ...]:
    return tuple(_integer(part) for part in text.split("/"))


def _integer(text: str) -> int:
    if not re.fullmatch(r"-?\d+", text):
        raise ValueError(f"a whole number is needed, got {text!r}")
    return int(text)


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError(f"on or off is needed, got {text!r}")
    return text == "on"


def _plain(setup: Setup) -> ExitPolicy:
    return FixedExit(None, 0, num_layers=setup.num_layers)


def _fixed(setup: Setup, exit_layer: int, length: int) -> ExitPolicy:
    return FixedExit(exit_layer, length, num_layers=setup.num_layers)


def _del(setup: Setup, *, cost: str = "layers", d_max: int = del_policy.MAX_SPECULATIONS, **options: Any) -> ExitPolicy:
    return del_policy.DelExit(num_layers=setup.num_layers, cost=setup.cost(cost), max_speculations=d_max, **options)


def _auto(setup: Setup, *, cost: str = "measured", d_max: int = auto.MAX_SPECULATIONS, **options: Any) -> ExitPolicy:
    found = setup.cost(cost)
    # A pre-verifier's passes are part of the cost, but are no part of the seconds that rounds are compared by.
    repair = cost == "measured" and setup.block is None and not getattr(found, "fixed", False)
    return auto.AutoExit(num_layers=setup.num_layers, cost=found, max_speculations=d_max, repair=repair, **options)


def _finite_state(setup: Setup, length: int = 4) -> StoppingPolicy:
    return finite_state.FiniteStateLength(length)


def _draft_verify(setup: Setup, **options: Any) -> StoppingPolicy:
    return draft_verify.DraftVerifyThreshold(**options)


def _svip(setup: Setup, **options: Any) -> StoppingPolicy:
    return entropy.SvipThreshold(**options)


def _adaedl(setup: Setup, **options: Any) -> StoppingPolicy:
    return entropy.AdaEdlThreshold(**options)


def _spide(setup: Setup, **options: Any) -> StoppingPolicy:
    return spide.SpideStopping(range(1, setup.num_layers), num_layers=setup.num_layers, **options)


def _pacer(setup: Setup, path: str | None = None, exit_layer: int | None = None, **options: Any) -> StoppingPolicy:
    if setup.preverifier is None:
        raise ValueError("'pacer' needs a pre-verifier: pass `preverifier`, which loads one for the model")
    loaded = setup.preverifier(path)
    own = {name: value for name, value in loaded.defaults.items() if name in ("b", "t", "rho")}
    return pacer.PacerStopping(loaded, **{**own, **options})


def _del_threshold(setup: Setup, **options: Any) -> StoppingPolicy:
    return del_policy.DelThreshold(num_layers=setup.num_layers, **options)


EXITS: dict[str, Named] = {
    "ar": Named(about="plain decoding", example="ar", build=_plain),
    "ls": Named(about="fixed exit layer and length", example="ls:3-6", build=_fixed, position="E-G"),
    "del": Named(
        about="DEL: exit layer by tokens per layer, dynamic threshold",
        example="del:on_stop=keep",
        build=_del,
        options={
            "cost": str,
            "layers": _layers,
            "d_max": _integer,
            "omega": float,
            "length": str,
            "no_speculation": _switch,
            "on_stop": str,
        },
    ),
    "auto": Named(
        about="exit layer and length by tokens per cost",
        example="auto:cost=layers",
        build=_auto,
        options={
            "cost": str,
            "layers": _layers,
            "d_max": _integer,
            "decay": float,
            "prompt_rows": _integer,
            "learn_every": _integer,
            "learn_first": _integer,
        },
    ),
}
"""Policies that choose the exit layer."""

STOPPINGS: dict[str, Named] = {
    "fs": Named(
        about="finite-state length", example="fs:3-6", build=_finite_state, position="G", position_optional=True
    ),
    "dv": Named(
        about="Draft&Verify's threshold",
        example="dv:3",
        build=_draft_verify,
        options={"start": float, "target": float, "step": float, "max_length": _integer},
    ),
    "svip": Named(
        about="SVIP's entropy bound",
        example="svip:3,threshold=0.6",
        build=_svip,
        options={"threshold": float, "max_length": _integer},
    ),
    "adaedl": Named(
        about="AdaEDL's entropy bound",
        example="adaedl:3",
        build=_adaedl,
        options={"start": float, "max_length": _integer},
    ),
    "spide": Named(
        about="SPIDE's reliability",
        example="spide:3,tau=0.7",
        build=_spide,
        options={"tau": float, "max_length": _integer, "learn_every": _integer, "shadow": _switch},
    ),
    "pacer": Named(
        about="Pacer's pre-verifier",
        example="pacer:FOLDER,t=0.7",
        build=_pacer,
        position="PATH",
        position_optional=True,
        options={
            "exit_layer": _integer,
            "b": _integer,
            "t": float,
            "rho": float,
            "criterion": str,
            "scope": str,
            "max_length": _integer,
        },
    ),
    "del": Named(
        about="DEL's dynamic threshold",
        example="ls:3-18+del",
        build=_del_threshold,
        options={"on_stop": str, "omega": float},
    ),
}
"""Policies that end a draft. Alone, all but "del" take a fixed exit layer first ("dv:3")."""


def parse_policy(
    text: str,
    *,
    num_layers: int,
    measure: Callable[[], CostModel] | None = None,
    preverifier: Callable[[str | None], pacer.PreVerifier] | None = None,
) -> Policy:
    """Build a policy from its name.

    measure: called for cost=measured, which is "auto"'s default. preverifier: called for "pacer", with the path given there
    or None for the one beside the checkpoint. The generator passes its calibration and its loader.
    Raises ValueError that says what is possible for an unknown name, an unknown option or a value that does not fit.
    """
    setup = Setup(num_layers=num_layers, measure=measure, preverifier=preverifier)
    text = text.strip()
    head, plus, tail = text.partition("+")
    name, arguments = _split(head)
    try:
        last: StoppingPolicy | None = None
        if plus and name in EXITS:
            other, other_arguments = _split(tail)
            if name == "ar":
                raise ValueError('"ar" drafts nothing: no stopping policy can follow it')
            if other not in STOPPINGS:
                raise ValueError(f"unknown stopping policy {other!r}")
            last = _build(setup, other, STOPPINGS[other], other_arguments)
        if name in EXITS:
            exit_policy, stopping = _with_own_stopping(setup, name, arguments, last)
        elif name in STOPPINGS:
            exit_policy, stopping = _with_fixed_exit(setup, name, arguments)
            if plus:
                raise ValueError(
                    f"{name!r} ends drafts itself: put {tail!r} behind an exit policy, as in ls:3-18+{tail}"
                )
        else:
            raise ValueError("unknown policy")
    except ValueError as error:
        raise ValueError(f"policy {text!r}: {error}; {_possible()}") from None
    return Policy(exit_policy, stopping, name=text)


def _with_own_stopping(
    setup: Setup, name: str, arguments: str, other: StoppingPolicy | None
) -> tuple[ExitPolicy, StoppingPolicy | None]:
    """An exit policy with the other stopping policy, or without one with that which it comes with."""
    values = _values(name, EXITS[name], arguments)
    if isinstance(other, pacer.PacerStopping):
        setup = replace(setup, block=other.b)
        _keep_to_layers(values, other.exit_layers, "layers" in EXITS[name].options)
    on_stop = values.pop("on_stop", "drop")
    if on_stop not in del_policy.ON_STOP:
        raise ValueError(f"on_stop must be one of {', '.join(del_policy.ON_STOP)}, got {on_stop!r}")
    built = EXITS[name].build(setup, **values)
    if other is not None:
        return built, other
    if isinstance(built, del_policy.DelExit) and values.get("length", "max") == "max":
        return built, del_policy.DelThreshold(num_layers=setup.num_layers, on_stop=on_stop, shared=built.matches)
    if isinstance(built, auto.AutoExit):
        return built, auto.AutoStopping(built.learner)
    return built, None


def _keep_to_layers(values: dict[str, Any], layers: tuple[int, ...], chooses: bool) -> None:
    """Let an exit policy plan with exit layers that the pre-verifier knows, and no others."""
    if chooses:
        values.setdefault("layers", layers)
    asked = values.get("layers", (values.get("exit_layer"),))
    if not set(asked) <= set(layers):
        raise ValueError(f"the pre-verifier judges exit layers {', '.join(map(str, layers))} only")


def _with_fixed_exit(setup: Setup, name: str, arguments: str) -> tuple[ExitPolicy, StoppingPolicy]:
    """A stopping policy behind a fixed exit layer, which comes first: "dv:3", "fs:3-6"; "pacer" knows its own."""
    if name == "pacer":
        values = _values(name, STOPPINGS[name], arguments)
        stopped = _pacer(setup, **values)
        assert isinstance(stopped, pacer.PacerStopping)
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
    stopping = _build(setup, name, STOPPINGS[name], rest)
    cap = stopping.max_length
    return FixedExit(exit_layer, cap, num_layers=setup.num_layers), stopping


def _split(part: str) -> tuple[str, str]:
    name, _, arguments = part.strip().partition(":")
    return name, arguments


def _build(setup: Setup, name: str, named: Named, arguments: str) -> Any:
    return named.build(setup, **_values(name, named, arguments))


def _values(name: str, named: Named, arguments: str) -> dict[str, Any]:
    """ARGS as keyword arguments; ValueError for what the name does not take."""
    parts = [part.strip() for part in arguments.split(",")] if arguments else []
    values: dict[str, Any] = {}
    if named.position and parts and "=" not in parts[0]:
        values.update(_position(name, named, parts.pop(0)))
    elif named.position and not named.position_optional:
        raise ValueError(f"{name!r} needs {_POSITIONS[named.position]} first, as in {named.example}")
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or key not in named.options:
            takes = ", ".join(f"{option}=" for option in named.options) or "no further arguments"
            raise ValueError(f"{name!r} takes {takes}, not {part!r}")
        try:
            values[key] = named.options[key](value)
        except ValueError as error:
            raise ValueError(f"{key}={value}: {error}") from None
    return values


_POSITIONS = {"E-G": "an exit layer and a length", "G": "a length", "PATH": "a folder"}


def _position(name: str, named: Named, text: str) -> dict[str, Any]:
    if named.position == "PATH":
        return {"path": text}
    match = re.fullmatch(r"(\d+)-(\d+)" if named.position == "E-G" else r"(\d+)", text)
    if match is None:
        raise ValueError(f"{name!r} takes {_POSITIONS[named.position]} first, as in {named.example}, not {text!r}")
    if named.position == "E-G":
        return {"exit_layer": int(match[1]), "length": int(match[2])}
    return {"length": int(match[1])}


def _possible() -> str:
    exits = ", ".join(f"{named.example} ({named.about})" for named in EXITS.values())
    stoppings = ", ".join(f"{named.example} ({named.about})" for name, named in STOPPINGS.items())
    return f"possible are {exits}; {stoppings}; or an exit policy with another way to stop, as in del+spide:tau=0.7"
