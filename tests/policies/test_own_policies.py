"""Policies of one's own by name: a class of a file or of a package, its arguments, and what is wrong with them."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from policies import FixedExit, Policy, parse_policy, runs_own_code

FILE = """
from collections.abc import Sequence
from dataclasses import dataclass
from policies import NeverStop, Plan, StatelessPolicy

print("run")

@dataclass
class Stops(NeverStop):
    share: float
    most: "int | None" = None
    layers: Sequence[int] = ()
    name: str = ""
    sure: bool = False

class Plans(StatelessPolicy):
    def __init__(self, layers, length=2):
        self.layers, self.length = layers, length

    def plan(self, context):
        return Plan(exit_layer=self.layers[context.round_index % 2], max_speculations=self.length)

class Knows(Plans):
    @classmethod
    def from_args(cls, setup, **options):
        return cls((setup.num_layers - 1,), **options)

class Other: ...

class Half:
    def plan(self, context): ...
"""


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the working directory."""
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "fails.py").write_text("import torch\n1 / 0")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine.py"


def parsed(text: str) -> Policy:
    return parse_policy(text, num_layers=8)


def test_arguments_are_read_as_they_are_annotated_or_as_they_look(file: Path, capsys: pytest.CaptureFixture) -> None:
    policy = parsed(f"ls:3-6+{file}:Stops:share=1,most=3,layers=2,name=3,sure=on")
    assert isinstance(policy.exit, FixedExit)
    stopping: Any = policy.stopping
    read = (stopping.share, stopping.most, stopping.layers, stopping.name, stopping.sure)
    assert read == (1.0, 3, (2,), "3", True) and isinstance(read[0], float)
    both: Any = parsed("mine.py:Plans:layers=1/4+mine.py:Stops:share=0.5")
    assert (both.exit.layers, both.exit.length, both.stopping.share) == ((1, 4), 2, 0.5)
    assert both.name == "mine.py:Plans:layers=1/4+mine.py:Stops:share=0.5"
    knowing: Any = parsed("mine.py:Knows:length=5+svip")
    assert (knowing.exit.layers, knowing.exit.length) == ((7,), 5)
    assert capsys.readouterr().out == "run\n"  # once


MISTAKES = {
    "there.py:Stops": r"there is no file .*there\.py",
    "mine.py": "has no class ''; it defines Stops, Plans, Knows, Other, Half",
    "ls:3-6+mine.py:Stop": "has no class 'Stop'; it defines Stops",
    "mine.py:Other": "'Other' is no policy: it has neither plan",
    "mine.py:Half": "'Half' lacks begin_text, exit_layers,.* let it inherit policies.StatelessPolicy",
    "mine.py:Plans": "missing 1 required positional argument: 'layers'",
    "mine.py:Plans:layers=1/2,lenght=3": "takes layers=, length=, not 'lenght=3'",
    "mine.py:Plans:layers=1/2+mine.py:Plans": "unknown stopping policy 'mine.py:Plans'",
    "mine.py:Stops:share=1": "'mine.py:Stops' ends drafts itself: put it after an exit policy, as in ls:3-18",
    "ls:3-6+mine.py:Stops:share=much": "share=much: could not convert",
    "fails.py:Stops": "fails.py fails: ZeroDivisionError: division by zero",
}


@pytest.mark.parametrize(("text", "message"), [*MISTAKES.items()])
def test_a_mistake_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parsed(text)


def test_a_package_names_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", "policies.thresholds:SvipThreshold", "selfspec.policies")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **wanted: EntryPoints([point]).select(**wanted))
    assert parsed("ls:2-4+mine:threshold=0.3").stopping.threshold(None) == 0.3
    own = ["mine", "ls:2-4+mine", "a.py:B:c=1", "auto + /tmp/a.py:B", "ls:1-2+svip+a.py:B"]
    assert [text for text in [*own, "auto", "del+spide:tau=0.7", "nonsense"] if runs_own_code(text)] == own
