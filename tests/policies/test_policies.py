"""Policies by name, the fixed exit layer, and how needs combine."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from policies import ObservationSpec, Plan, Policy, RoundContext, parse_policy, runs_own_code
from policies.del_policy import DelThreshold
from policies.fixed import FiniteStateLength
from policies.own import named_by_packages
from policies.spide import SpideStopping
from policies.thresholds import SvipThreshold
from records import row, shadow
from scripted_policies import ScriptedExit, StopAtTokens, StopBelow

FIRST_ROUND = RoundContext(round_index=0, num_committed=4, remaining_tokens=10)


def test_a_policy_by_name_is_what_its_arguments_say() -> None:
    released, printed = (parse_policy(name, num_layers=4) for name in ("del:omega=0.5", "del:as=printed"))
    for policy, before, after in ((released, False, True), (printed, True, False)):
        for one in (policy, policy.clone_for_sequence()):
            assert isinstance(one.stopping, DelThreshold)
            one.observe_prompt(shadow([1, 2, 3], [[1, 0]] * 3, [[0.75, 0.25]] * 3))
            asked = (
                one.stopping.stop_before_draw(row(confidence=0.1)),
                one.stopping.stop_after_draw(row(confidence=0.1), 0),
            )
            assert asked == (before, after)
            at_tau = row(confidence=0.5)
            assert not (one.stopping.stop_before_draw(at_tau) or one.stopping.stop_after_draw(at_tau, 0))
    spide = parse_policy("spide:3,tau=0.6", num_layers=8)
    assert isinstance(spide.stopping, SpideStopping)
    assert spide.stopping.tau == 0.6
    assert spide.exit.plan(FIRST_ROUND) == Plan(exit_layer=3, max_speculations=18)
    assert parse_policy("dv:2", num_layers=8).exit.plan(FIRST_ROUND) == Plan(exit_layer=2, max_speculations=18)
    finite = parse_policy("fs:2-5", num_layers=8)
    assert isinstance(finite.stopping, FiniteStateLength)
    assert finite.stopping.length == 5
    assert parse_policy("del:length=tpl", num_layers=8).stopping is None


AS_IN = dict.fromkeys(
    ["ls", "ls:", "ls:3", "ls:3-", "ls:-6", "ls:3-6-1", "ls:a-b", "ls:3--6", "ls:3.5-2"], "as in ls:3-6"
)
CLOSEST = {
    "": "unknown.*known are ar, copy, ls, bits, wave, del, auto, fs,",
    "nonsense": "unknown.*known are ar, copy, ls,",
    "LS:3-6": "unknown.*did you mean ls",
    "spyde:3": r"unknown.*did you mean spide\?",
    "atuo": r"unknown.*did you mean auto\?",
    "del+nonsense": "unknown.*known are fs, dv, svip, adaedl, spide, pacer, del",
    "del+adadel": "unknown.*did you mean adaedl",
    "ls:1-2+auto": "unknown stopping policy 'auto'",
}
MISTAKES = {
    "ar:3": "no further arguments",
    "ls:99-4": r"exit_layer must be in \[1, 7\] for this 8-layer model, got 99",
    "ls:99-0": r"exit_layer must be in \[1, 7\]",
    "ls:3-0+dv": "drafts nothing",
    "del:omega=0.9,omega=0.5": "omega= is given twice",
    "del:state=kept": "takes as=, cost=, layers=",
    "ls:3-18+del:as=written": "as must be one of released, printed, got 'written'",
    "ar+dv": "drafts nothing",
    "del:3": "takes as=, cost=, layers=",
    "del:cost=free": "cost must be one of layers, measured",
    "del:layers=2/9": r"\[1, 7\]",
    "del:omega=x": "omega=x",
    "auto:copy=yes": "on or off",
    "spide:3,bins=ten": "bins must be one of paper, fine",
    "dv": "needs an exit layer first",
    "dv:9": r"\[1, 7\]",
    "dv:3+svip": "ends drafts itself",
    "fs:3": "needs an exit layer first",
    "spide:3,tau=2": r"tau must be in \(0, 1\)",
    "svip:3,tau=2": "takes threshold=, max_length=",
    "auto": "needs measured seconds",
}
OWN = {
    "there.py:Stops": "there is no file .*there.py",
    "mine.py": "has no class ''; it defines Stops, Plans, Half, Needs",
    "ls:3-6+mine.py:Stop": "has no class 'Stop'; it defines Stops",
    "ls:3-6+mine.py:Path": "'Path' is no policy: it has neither plan",
    "mine.py:Half": "'Half' lacks begin_text, exit_layers,.* let it inherit policies.StatelessPolicy",
    "mine.py:Plans": "missing 1 required positional argument: 'layers'",
    "mine.py:Plans:layers=1/2,lenght=3": "takes layers=, length=, not 'lenght=3'",
    "mine.py:Plans:layers=1/2+mine.py:Plans": "unknown stopping policy 'mine.py:Plans'",
    "mine.py:Stops:share=1": "ends drafts itself: put it after an exit policy, as in ls:3-18",
    "ls:3-6+mine.py:Stops:share=much": "share=much: could not convert",
    "fails.py:Stops": "fails.py fails: ZeroDivisionError: division by zero",
    "ends.py:Stops": "ends.py fails: SystemExit: 0",
    "reads.py:Stops": "reads.py fails: FileNotFoundError: .*missing.txt",
    "mine.py:Plans:layers=1": "Plans cannot be made: 'int' object is not iterable",
    "ls:3-6+mine.py:Needs:share=2": "Needs cannot be made: KeyError: 2.0",
}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, code in (("fails", "1 / 0"), ("ends", "raise SystemExit(0)"), ("reads", "open('missing.txt')")):
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    (tmp_path / "mine.py").write_text(
        """
from dataclasses import dataclass
from pathlib import Path
from policies import NeverStop, Plan, StatelessPolicy

@dataclass
class Stops(NeverStop):
    share: float
    layers: "list[int] | None" = None
    name: str = ""
    sure: bool = False

class Plans(StatelessPolicy):
    def __init__(self, layers, length=2):
        self.layers, self.length = layers, length

    @classmethod
    def from_args(cls, setup, layers, **options):
        return cls([min(layer, setup.num_layers - 1) for layer in layers], **options)

    def plan(self, context): ...

class Half:
    def plan(self, context): ...

class Needs(NeverStop):
    @classmethod
    def from_args(cls, setup, *, share: float):
        return {1.0: cls()}[share]
"""
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine.py"


def test_a_class_of_a_file_gets_arguments_as_they_are_annotated_or_look(mine: Path) -> None:
    policy = parse_policy(f"ls:3-6+{mine}:Stops:share=1,layers=2,name=3,sure=on", num_layers=8)
    assert repr(policy.stopping) == "Stops(share=1.0, layers=(2,), name='3', sure=True)"
    name = "mine.py:Plans:layers=1/9+mine.py:Stops:share=0.5"
    both: Any = parse_policy(name, num_layers=8)
    assert (both.name, both.exit.layers, both.exit.length, both.stopping.share) == (name, [1, 7], 2, 0.5)
    assert type(both.stopping) is type(policy.stopping)  # it was run once


def test_a_package_names_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", "policies.thresholds:SvipThreshold", "selfspec.policies")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **wanted: EntryPoints([point]).select(**wanted))
    named_by_packages.cache_clear()
    assert isinstance(parse_policy("ls:2-4+mine:threshold=0.3", num_layers=8).stopping, SvipThreshold)
    own = ["mine", "ls:2-4+mine", "a.py:B:c=1", "auto + /tmp/a.py:B", "ls:1-2+svip+a.py:B"]
    assert [text for text in [*own, "auto", "del+spide:tau=0.7", "nonsense"] if runs_own_code(text)] == own
    named_by_packages.cache_clear()


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(("text", "message"), [*(AS_IN | CLOSEST | MISTAKES | OWN).items()])
def test_a_mistake_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        parse_policy(text, num_layers=8)
    assert repr(text) in str(error.value)
    assert len(str(error.value)) < 200 and "\n" not in str(error.value)


def test_needs_are_joined() -> None:
    left = ObservationSpec(confidence=True, shadow_layers=(3, 1), prompt_rows=8, learn_every=4)
    right = ObservationSpec(entropy=True, shadow_layers=(2, 3), prompt_rows=32, learn_every=2)
    assert left | right == ObservationSpec(
        confidence=True, entropy=True, shadow_layers=(1, 2, 3), prompt_rows=32, learn_every=2
    )
    # A part that learns nothing does not ask for every round.
    assert (left | ObservationSpec(exit_hidden=True)).learn_every == 4
    assert (left | ObservationSpec(exit_hidden=True)).exit_hidden
    policy = ScriptedExit([(1, 1)], ObservationSpec(entropy=True))
    assert Policy(policy).observes == ObservationSpec(entropy=True)
    assert Policy(policy, StopBelow(0.5)).observes == ObservationSpec(entropy=True, confidence=True)
    assert Policy(policy, StopAtTokens([1])).observes == ObservationSpec(entropy=True)


def test_the_prompt_alone_can_be_learned_from() -> None:
    prompt = ObservationSpec(shadow_layers=(2,), learn_every=0, prompt_rows=32)
    assert prompt.prompt_rows_for(100, 50) == 32
    assert not prompt.learns(0, 0)
    assert not ObservationSpec(learn_every=1).learns(0, 0)
    # Beside a policy that learns from rounds it changes nothing of their schedule.
    assert (prompt | ObservationSpec(shadow_layers=(1,), learn_every=4)).learn_every == 4
    assert (prompt | ObservationSpec(confidence=True)).learn_every == 0


def test_prompt_rows_shrink_with_the_text_to_come() -> None:
    observes = ObservationSpec(shadow_layers=(1,), prompt_rows=16, prompt_every=6)
    assert [observes.prompt_rows_for(100, tokens) for tokens in (1, 12, 95, 96, 500)] == [0, 2, 15, 16, 16]
    assert observes.prompt_rows_for(7, 500) == 7
    assert ObservationSpec(shadow_layers=(1,), prompt_rows=32).prompt_rows_for(100, 1) == 32
    assert ObservationSpec(prompt_rows=32).prompt_rows_for(100, 100) == 0


def test_files_in_two_folders_each_import_their_own_neighbour(tmp_path: Path) -> None:
    stop = "from beside_it import LIMIT\nfrom policies import NeverStop\n\nclass Stop(NeverStop):\n    limit = LIMIT\n"
    found = []
    for limit in (1, 2):
        folder = tmp_path / str(limit)
        folder.mkdir()
        (folder / "beside_it.py").write_text(f"LIMIT = {limit}\n", encoding="utf-8")
        (folder / "mine.py").write_text(stop, encoding="utf-8")
        found.append(parse_policy(f"ls:1-2+{folder / 'mine.py'}:Stop", num_layers=4).stopping.limit)
    assert found == [1, 2]
