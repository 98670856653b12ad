"""The check of the kernels before their first use: it passes, and it finds what a compiler might do wrong."""

from __future__ import annotations

import copy
import ctypes
from typing import Any

import pytest
import torch

from layerskip_models.kernels import check, library
from layerskip_models.kernels.check import native_works
from test_native import CPU, every_variant, needs_native, use


@needs_native
@every_variant
def test_the_check_at_load_passes(variant: str) -> None:
    with use(variant):
        assert check.fault() is None


@needs_native
@pytest.mark.parametrize(("function", "texts"), [("linear", 1), ("normalised_linear", 1), ("step", 1), ("step", 2)])
def test_the_check_at_load_finds_a_row_that_depends_on_its_company(
    function: str, texts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more rounding where there are several rows, or several texts, as a compiler might introduce it, is enough."""
    chosen, found = library.load(), f"{function} computes a row otherwise in company, on 1 threads"
    right = getattr(chosen, function)

    def wrong(*arguments: Any) -> int:
        job = right(*arguments)
        if function == "step":
            step = library.Step.from_address(arguments[0])
            several, result = step.rows > 1 and step.num_spans >= texts, step.outputs
        else:
            rows, result = {"linear": arguments[2:5:2], "normalised_linear": arguments[4:6]}[function]
            several = rows > 1
        if several:
            ctypes.c_int32.from_address(result).value ^= 1  # the last bit of the first number
        return job

    broken = copy.copy(chosen)
    setattr(broken, function, wrong)
    monkeypatch.setattr(library, "kernels", lambda: broken)
    assert check.fault() == found
    monkeypatch.setenv("SELFSPEC_NATIVE", "1")
    check._passes.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=f"no native kernels.* failed their check on this machine: {found}"):
            assert not native_works(CPU, torch.float32)
        assert not native_works(CPU, torch.float32)  # without another warning
        monkeypatch.setenv("SELFSPEC_NATIVE", "require")
        check._passes.cache_clear()
        with pytest.raises(library.KernelsUnavailableError, match=found):
            native_works(CPU, torch.float32)
    finally:
        check._passes.cache_clear()


@needs_native
def test_the_check_at_load_finds_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = library.load()

    shape = library.Shape(43, 6, 2, 18, 1e-5, 1.0)

    def unscaled(step: int, threads: int) -> int:
        library.Step.from_address(step).shape = ctypes.addressof(shape)
        return chosen.step(step, threads)

    broken = copy.copy(chosen)
    vars(broken)["step"] = unscaled
    monkeypatch.setattr(library, "kernels", lambda: broken)
    assert check.fault() == "step computes something else"
