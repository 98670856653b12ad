"""How many files somebody reads who follows a round: docs/architecture.md names the number."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import selfspec.engine.engine
from batched_runs import LAYOUTS, generator_of
from layerskip_models.linear import Layout

ROOT = Path(selfspec.engine.engine.__file__).parents[2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_round_with_a_fixed_exit_runs_code_of_twelve_files(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the engine and the policies, that is. A step of the engine adds two: engine.py and runner.py."""
    run, original = set[str](), selfspec.engine.engine.run_round

    def traced(*arguments: Any) -> Any:
        sys.setprofile(lambda frame, event, argument: run.add(frame.f_code.co_filename))
        try:
            return original(*arguments)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(selfspec.engine.engine, "run_round", traced)
    generator_of(layout).generate([5, 1, 7], max_new_tokens=20, policy="ls:2-3")
    assert len([path for path in run if path.startswith((f"{ROOT}/selfspec/", f"{ROOT}/policies/"))]) == 12
