"""Every number in a policy's name has an upper bound, which is checked before anything is made of that size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerskip_models import from_transformers
from policies import EXITS, STOPPINGS, CopyExit, DelExit, FixedExit, PacerStopping, SvipThreshold
from policies.auto.policy import AutoExit
from policies.bounds import MOST_DRAFTS
from policies.names import _integer, _layers
from selfspec import SelfSpecGenerator
from test_policy_options import form, parsed
from tiny_llama import tiny_llama

HUGE = (10**7, 10**9, 10**40)


def names_with_a_number() -> Iterator[str]:
    """Each policy name with {} in place of one of its whole numbers."""
    for known in (EXITS, STOPPINGS):
        for name, named in known.items():
            before = "ls:3-4+" if name == "del" and known is STOPPINGS else ""
            for option, convert in named.options.items():
                if convert in (_integer, _layers):
                    learns = ["shadow=on"] if "shadow" in named.options and option == "learn_every" else []
                    yield before + form(name, (f"{option}={{}}", *learns))
    yield from ("bits:8-{}", "ls:3-{}", "ls:{}-3", "fs:2-{}", "copy:{}", "auto+pacer:folder,b={}")


@pytest.mark.parametrize("name", [*names_with_a_number()])
def test_every_whole_number_of_a_name_is_bounded(name: str) -> None:
    for number in HUGE:
        with pytest.raises(ValueError, match=r"must be (an integer )?in \[|layers 1, 3 only") as error:
            parsed(name.format(number))
        assert len(str(error.value)) < 400
    with pytest.raises(ValueError):
        parsed(name.format("9" * 5000))


@pytest.mark.parametrize("name", ["del:omega={}", "auto:decay={}", "dv:2,start={}", "dv:2,target={}", "dv:2,step={}",
                                  "svip:2,threshold={}", "adaedl:2,start={}", "spide:2,tau={}", "pacer:folder,t={}",
                                  "pacer:folder,rho={}"])  # fmt: skip
def test_no_fraction_is_none(name: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parsed(name.format("nan"))
    with pytest.raises(ValueError):
        parsed("pacer:folder,rho=inf")


def test_the_same_bounds_hold_for_objects() -> None:
    most = MOST_DRAFTS
    assert FixedExit(2, most, num_layers=4) and CopyExit(32)
    for make in (
        lambda: FixedExit(2, most + 1, num_layers=4),
        lambda: DelExit(num_layers=4, max_speculations=most + 1),
        lambda: AutoExit(num_layers=4, max_speculations=most + 1),
        lambda: AutoExit(num_layers=4, prompt_rows=10**5),
        lambda: AutoExit(num_layers=4, learn_first=-1),
        lambda: SvipThreshold(max_length=most + 1),
        lambda: SvipThreshold(max_length=True),
        lambda: PacerStopping(None, b=most + 1),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=r"must be an integer in \["):
            make()


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("lsautodelcopyfsdvspidebits8:-+,=/0123456789_ .e"), max_size=40))
def test_any_name_is_parsed_or_refused_in_one_line(text: str) -> None:
    try:
        policy = parsed(text)
    except ValueError as error:
        assert "\n" not in str(error).replace(repr(text), "")
    else:
        assert policy.observes.prompt_rows <= 256


def test_a_draft_distribution_that_does_not_fit_ends_only_its_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampled text keeps the distributions of its drafts. Where there is no memory for them the others go on."""
    generator = SelfSpecGenerator(from_transformers(tiny_llama(seed=3)), runner="eager")
    calm: dict[str, Any] = {"prompt": [1, 2, 3], "max_new_tokens": 12, "policy": "ls:2-3"}
    expected = generator.generate(**calm).new_tokens
    empty = torch.empty

    def little_memory(*size: Any, **options: Any) -> torch.Tensor:
        if len(size) == 2 and size[1] == generator.model.vocab_size and size[0] > 8:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return empty(*size, **options)

    monkeypatch.setattr("selfspec.engine.runners.eager.torch.empty", little_memory)
    with generator.engine() as engine:
        calm_ticket = engine.add(**calm)
        greedy_for_memory = engine.add([4, 5, 6], max_new_tokens=40, policy="ls:2-20", do_sample=True, seed=1)
        found: dict[int, list[Any]] = {calm_ticket: [], greedy_for_memory: []}
        while len(engine):
            for progress in engine.step():
                found[progress.ticket].append(progress)
    assert isinstance(found[greedy_for_memory][-1].error, RuntimeError)
    assert found[calm_ticket][-1].result.new_tokens == expected
