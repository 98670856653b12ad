"""How many files somebody reads who follows a round: docs/architecture.md names the number."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import selfspec.engine.engine
from batched_runs import LAYOUTS, generator_of
from layerskip_models.linear import Layout

ROOT = Path(selfspec.engine.engine.__file__).parents[2]
FILES = {
    *(f"policies/{name}.py" for name in ("base", "bounds", "fixed", "records")),
    *(f"selfspec/engine/{name}.py" for name in ("round", "sequence", "draft", "verification", "accept", "stopping")),
    *("selfspec/engine/results.py", "selfspec/engine/runners/eager.py"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_round_with_a_fixed_exit_runs_code_of_twelve_files(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the engine and the policies, that is. A step of the engine adds two: engine.py and runner.py."""
    run: set[str] = set()
    original = selfspec.engine.engine.run_round

    def see(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            run.add(path.relative_to(ROOT).as_posix())

    def traced(*arguments: Any) -> Any:
        sys.setprofile(see)
        try:
            return original(*arguments)
        finally:
            sys.setprofile(None)

    with generator_of(layout).engine() as engine:
        engine.add([5, 1, 7], max_new_tokens=20, policy="ls:2-3")
        engine.step()  # reads the prompt
        monkeypatch.setattr(selfspec.engine.engine, "run_round", traced)
        (output,) = engine.step()
    assert output.record is not None and output.record.draft_tokens
    assert {path for path in run if path.startswith(("selfspec/", "policies/"))} == FILES
    assert len(FILES) == 12
