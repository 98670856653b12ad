"""Files that commit 10f4848 wrote, kept in kept.zip: each loads still and does what it did, or is refused with the remedy.

`EXPECTED` is what that commit printed for them. The model has 4 layers; adapters and states are of it. A policy or a
form that goes moves from a list of what loads to one of what is refused.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.dynamic_module_utils
from transformers import AutoModelForCausalLM

from layerskip_models import load_model
from policies import parse_policy
from selfspec import SelfSpecGenerator
from selfspec.defaults import fixed_policy
from selfspec.pacer.inference import PreVerifiers

ARCHIVE = zipfile.ZipFile(Path(__file__).parents[1] / "kept.zip")
GREEDY = {
    "model": [8, 21, 21, 21, 21, 23, 21, 4, 21, 21, 21, 14],
    "draft.gguf": [21, 11, 16, 19, 20, 11, 16, 15, 19, 9, 19, 20],
}
"""What each model says after 3, 1, 4. The two likeliest tokens differ by .006 or more everywhere."""
ACCEPTED = {
    "none": (332, 112), "low-rank": (338, 110), "learned": (319, 116), "pacer": (157, 68),
}  # fmt: skip
"""Tokens drafted and accepted in 30 after each of 8 prompts: by `ls:2-3` with the adapters of each folder, and by Pacer."""
STATES: list[dict[str, Any]] = json.loads(ARCHIVE.read("states.json"))


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all of them, where paths that they hold begin."""
    ARCHIVE.extractall(tmp_path / "kept")
    monkeypatch.chdir(tmp_path / "kept")
    return tmp_path / "kept"


def generator(folder: str = "model", exits: str | None = None) -> SelfSpecGenerator:
    return SelfSpecGenerator(load_model(Path(folder), dtype="float32", device="cpu", exits=exits))


@pytest.mark.parametrize("name", GREEDY)
def test_models(name: str) -> None:
    """A checkpoint, and a GGUF file that `export-draft` wrote."""
    for policy in ("ar", "ls:1-3"):
        found = generator(name).generate([3, 1, 4], max_new_tokens=12, eos_token_id=[], policy=policy)
        assert found.new_tokens == GREEDY[name]


@pytest.mark.parametrize("name", ACCEPTED)
def test_adapters_and_a_pre_verifier(name: str) -> None:
    policy = "pacer:pacer" if name == "pacer" else "ls:2-3"
    engine = generator(exits=None if name in ("none", "pacer") else name)
    found = [engine.generate([i, 3, 1], max_new_tokens=30, eos_token_id=[], policy=policy).stats for i in range(8)]
    assert (sum(one.num_drafted for one in found), sum(one.num_accepted for one in found)) == ACCEPTED[name]
    assert fixed_policy("model", 4) == "ls:2-3"


def test_adapters_steered_by_normed_states_are_refused() -> None:
    with pytest.raises(ValueError, match="train them again with selfspec train-exit"):
        generator(exits="steered")


REFUSED = {
    "auto": "it was saved by another version",  # which has been written anew
    "fs": "keeps nothing, but the saved state holds",  # it starts each prompt anew
    "spide": "for other bins of confidence: start without it",
}


@pytest.mark.parametrize("saved", STATES, ids=lambda saved: saved["policy"])
def test_states_of_policies(saved: dict[str, Any], kept: Path) -> None:
    (kept / "state.json").write_text(json.dumps(saved), encoding="utf-8")
    engine = generator()
    gone = saved["policy"].startswith("copy+")
    if gone or "state=kept" in saved["policy"]:  # the name says what to use instead
        message = "say copy alone, or auto, which copies and drafts" if gone else r"'del' takes .*, not 'state=kept'"
        with pytest.raises(ValueError, match=message):
            engine.resolve_policy(saved["policy"])
        with pytest.raises(ValueError, match="load it into that policy, or start without it"):
            engine.resolve_policy("dv:2").load(kept / "state.json")
        return
    policy = parse_policy(saved["policy"], num_layers=4, preverifier=PreVerifiers(engine.model))
    name = saved["policy"].partition(":")[0]
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            policy.load(kept / "state.json")
        return
    policy.load(kept / "state.json")
    assert {"policy": policy.name, **policy.state()} == saved
    found = engine.generate([3, 1, 4], max_new_tokens=12, eos_token_id=[], policy=policy)
    assert found.new_tokens == GREEDY["model"]


def test_a_folder_for_the_hub(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own code calls selfspec by the names that there were."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(kept / "model", kept / "hub", dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(kept / "hub", trust_remote_code=True)
    found = model.generate(
        torch.tensor([[3, 1, 4]]), max_new_tokens=12, do_sample=False, eos_token_id=None, return_dict_in_generate=True
    )
    assert found.sequences[0, 3:].tolist() == GREEDY["model"]
    assert found.stats[0].num_drafted > 0
