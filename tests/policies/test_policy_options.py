"""Every option of every policy name changes the policy, or is refused; and nothing is learned that is never asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import Policy, parse_policy
from policies.names import EXITS, STOPPINGS, _integer, _layers
from scripted_policies import made_up_cost

NUM_LAYERS = 5

OTHER_VALUES: dict[str, tuple[str, ...]] = {  # by option; for one whose default depends on the name, several
    "cost": ("layers", "measured"), "layers": ("1/3", "3"), "d_max": ("3",), "omega": ("0.5",), "length": ("tpl",),
    "as": ("printed",), "bins": ("fine", "paper"),
    "start": ("0.3",), "target": ("0.3",),
    "step": ("0.3",), "max_length": ("5",), "threshold": ("0.3",), "tau": ("0.3",),
    "exit_layer": ("1", "3"), "b": ("2",), "t": ("0.3",), "rho": ("1.3",),
    "min": ("3",), "copy": ("off",), "bits": ("off",), "layer": ("2",), "loop": ("2",),
}  # fmt: skip

FIRST = {
    "copy": "4", "ls": "3-4", "bits": "8-4", "fs": "2-4", "dv": "2", "svip": "2", "adaedl": "2", "spide": "2",
    "pacer": "folder",
}  # fmt: skip
REFUSED = {("bits", "del"), ("bits", "pacer")}


class NoPreVerifier:
    """Stands where a trained one would: it knows two layers and is never asked."""

    exit_layers = (1, 3)
    defaults: Mapping[str, float] = {"exit_layer": 3}

    def pass_seconds(self, block: int) -> float:
        """What a pass costs, for policies that measure."""
        return 0.5


def parsed(text: str) -> Policy:
    return parse_policy(
        text,
        num_layers=NUM_LAYERS,
        num_loops=NUM_LAYERS if text.startswith("wave") else 1,
        measure=lambda: made_up_cost(NUM_LAYERS),
        preverifier=lambda path: NoPreVerifier(),  # type: ignore[arg-type,return-value]
        draft_bits=(8,),
    )


def inside(value: Any) -> Any:
    """All that an object holds, comparable, but for what each part asks the engine for."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): inside(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [inside(item) for item in value]
    if is_dataclass(value):
        return [type(value).__name__, {field.name: inside(getattr(value, field.name)) for field in fields(value)}]
    if type(value).__module__.startswith("policies"):
        names = [*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())]
        return [type(value).__name__, {name: inside(getattr(value, name)) for name in names if "needs" not in name}]
    return repr(value) if not isinstance(value, (int, float, str, type(None))) else value


def signature(text: str) -> Any:
    """What the engine sees of a policy: its parts, and what they ask for together."""
    policy = parsed(text)
    return inside([policy.exit, policy.stopping, policy.observes])


def form(name: str, arguments: tuple[str, ...]) -> str:
    parts = [FIRST[name]] if name in FIRST else []
    return ":".join(part for part in (name, ",".join([*parts, *arguments])) if part)


def forms() -> Iterator[tuple[str, str | None]]:
    """(exit or lone stopping policy, stopping policy behind it)."""
    for name in EXITS:
        yield name, None
        followed = [] if name in ("ar", "copy", "wave") else STOPPINGS
        yield from ((name, other) for other in followed if (name, other) not in REFUSED)
    yield from ((name, None) for name in STOPPINGS if name != "del")


def text_of(name: str, other: str | None, options: Mapping[tuple[int, str], str]) -> str:
    """options: by (0 for the first name or 1 for the one behind the plus, option)."""
    first = form(name, tuple(f"{key}={value}" for (place, key), value in options.items() if place == 0))
    if other is None:
        return first
    parts = {"fs": "fs:3", "pacer": "pacer:folder"}.get(other, other)
    behind = ",".join(f"{key}={value}" for (place, key), value in options.items() if place == 1)
    return f"{first}+{parts}" + (("," if ":" in parts else ":") + behind if behind else "")


@pytest.mark.parametrize(("name", "other"), list(forms()))
def test_an_option_changes_the_policy_or_is_refused(name: str, other: str | None) -> None:
    """Alone and beside every other option."""
    known = {(0, key) for key in (EXITS.get(name) or STOPPINGS[name]).options}
    if other is not None:
        known |= {(1, key) for key in STOPPINGS[other].options}
    contexts: list[dict[tuple[int, str], str]] = [{}]
    contexts += [{place: value} for place in sorted(known) for value in OTHER_VALUES[place[1]][-1:]]
    # In one order whatever is beside what, so that each pair of options is parsed once.
    signature_of = cache(lambda options: signature(text_of(name, other, dict(options))))
    for context in contexts:
        try:
            before = signature_of(tuple(context.items()))
        except ValueError:
            assert context, "without options every form must do"
            continue
        for place in sorted(known - context.keys()):
            changed = False
            for value in OTHER_VALUES[place[1]]:
                options = tuple(sorted({**context, place: value}.items()))
                try:
                    changed = changed or signature_of(options) != before
                except ValueError as error:
                    assert len(str(error)) < 200
                    changed = True  # one line says why not
            assert changed, f"{place[1]}= changes nothing in {dict(options)}, and is not refused"


@pytest.mark.parametrize(("name", "other"), list(forms()))
def test_no_layer_is_learned_that_is_never_chosen(name: str, other: str | None) -> None:
    text = text_of(name, other, {})
    policy = parsed(text)
    assert policy.name == text
    json.dumps([policy.exit.state(), policy.stopping and policy.stopping.state()])
    layers = policy.exit.exit_layers
    assert layers is not None and {*policy.observes.shadow_layers} <= {*layers}
    assert policy.observes.shadow_layers == () or "dv" not in (name, other) or name not in FIRST


def names_with_a_number() -> Iterator[str]:
    """Each policy name with {} in place of one of its whole numbers."""
    for known in (EXITS, STOPPINGS):
        for name, named in known.items():
            before = "ls:3-4+" if name == "del" and known is STOPPINGS else ""
            for option, convert in named.options.items():
                if convert in (_integer, _layers):
                    yield before + form(name, (f"{option}={{}}",))
    yield from ("bits:8-{}", "ls:3-{}", "ls:{}-3", "fs:2-{}", "copy:{}", "auto+pacer:folder,b={}")


@pytest.mark.parametrize("name", [*names_with_a_number()])
def test_every_whole_number_of_a_name_is_bounded(name: str) -> None:
    for number in (10**7, 10**9, 10**40):
        with pytest.raises(ValueError, match=r"must be (an integer )?in \[|layers 1, 3 only") as error:
            parsed(name.format(number))
        assert len(str(error.value)) < 400
    with pytest.raises(ValueError):
        parsed(name.format("9" * 5000))


def test_a_round_drafts_at_most_64_tokens() -> None:
    """As docs/serving.md says."""
    assert parsed("ls:3-64").exit.plan(None).max_speculations == 64
    with pytest.raises(ValueError, match=r"an integer in \[0, 64\], got 65"):
        parsed("ls:3-65")


FRACTIONS = [
    "del:omega", "dv:2,start", "dv:2,target", "dv:2,step", "svip:2,threshold", "adaedl:2,start", "spide:2,tau",
    "pacer:folder,t", "pacer:folder,rho",
]  # fmt: skip


@pytest.mark.parametrize("name", [*(f"{fraction}=nan" for fraction in FRACTIONS), "pacer:folder,rho=inf"])
def test_no_fraction_is_none(name: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parsed(name)


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("lsautodelcopyfsdvspidebits8:-+,=/0123456789_ .e"), max_size=40))
def test_any_name_is_parsed_or_refused_in_one_line(text: str) -> None:
    try:
        policy = parsed(text)
    except ValueError as error:
        assert "\n" not in str(error).replace(repr(text), "")
    else:
        assert policy.observes.prompt_rows <= 256
