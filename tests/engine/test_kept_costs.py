"""Costs kept from process to process: found by the same model on the same machine, and not by others; broken files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.kernels.threads import on_threads
from policies import MeasuredCost
from selfspec.engine import kept_costs
from selfspec.engine.kept_costs import keep_cost, kept_cost
from tiny_llama import tiny_llama

COST = MeasuredCost(4, layer_seconds=(1.0, 1.5), head_seconds=(0.5, 0.75), draft_seconds=-0.1, description="by hand")
KEPT = replace(COST, rounded=((8, COST),), adapter_seconds=((1, 0.25),))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "costs.json"


def model(seed: int = 1, num_layers: int = 4) -> LayerSkipModel:
    return from_transformers(tiny_llama(seed=seed, num_layers=num_layers), layout="plain")


def test_what_was_kept_is_found_by_weights_of_the_same_shapes(file: Path) -> None:
    assert kept_cost(model(), "eager") is None
    keep_cost(model(), "eager", KEPT)
    assert kept_cost(model(seed=2), "eager") == KEPT
    assert kept_cost(model(), "graphs") is None
    assert kept_cost(model(num_layers=3), "eager") is None
    with on_threads(7):
        assert kept_cost(model(), "eager") is None
    assert [path.name for path in file.parent.iterdir()] == ["costs.json"]


def test_the_oldest_goes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_costs, "_MOST_ENTRIES", 2)
    made = [model(), model(num_layers=3), model(num_layers=2)]
    for one in (*made[:2], made[0], made[2]):
        keep_cost(one, "eager", replace(COST, num_layers=one.num_layers))
    assert [kept_cost(one, "eager") is None for one in made] == [False, True, False]


WHOLE = {"version": 1, "costs": {"KEY": COST.as_dict()}}
BROKEN_VALUES = [
    {"layer_seconds": [1.0]}, {"layer_seconds": [1.0, -1.0]}, {"layer_seconds": "ab"}, {"layer_seconds": {}}, {"fixed": True},
    {"draft_seconds": "1"}, {"draft_seconds": float("nan")}, {"head_seconds": [1.0, float("inf")]}, {"num_layers": 5},
    {"batch_size": 0}, {"unknown": 1}, {"rounded": [[8]]}, {"adapter_seconds": [1]},
    {"rounded": [[8, {**COST.as_dict(), "draft_seconds": 1e9}]]},
]  # fmt: skip
BROKEN_FILES = [
    b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"version": 1}', b'{"version": 1, "costs": 3}', b"[" * 99_999,
    json.dumps({**WHOLE, "version": 2}).encode(), json.dumps({**WHOLE, "costs": {"KEY": []}}).encode(),
    json.dumps(WHOLE).encode() + b" " * (1 << 20),
    *(json.dumps({**WHOLE, "costs": {"KEY": {**COST.as_dict(), **value}}}).encode() for value in BROKEN_VALUES),
]  # fmt: skip


@pytest.mark.parametrize("text", BROKEN_FILES)
def test_a_broken_file_is_no_file_and_is_replaced(file: Path, text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_costs, "_key", lambda *model: "KEY")
    file.parent.mkdir()
    file.write_bytes(json.dumps(WHOLE).encode())
    assert kept_cost(model(), "eager") == COST
    file.write_bytes(text)
    assert kept_cost(model(), "eager") is None
    keep_cost(model(), "eager", COST)
    assert kept_cost(model(), "eager") == COST


@pytest.mark.parametrize("place", ["", "\0", "/dev/null/cache", "/proc/self"])
def test_nowhere_to_write(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_costs.os, "environ", {"SELFSPEC_CACHE": place})
    keep_cost(model(), "eager", COST)
    assert kept_cost(model(), "eager") is None


def test_a_folder_in_its_place(file: Path) -> None:
    file.mkdir(parents=True)
    keep_cost(model(), "eager", COST)
    assert kept_cost(model(), "eager") is None and [*file.parent.iterdir()] == [file]


def test_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SELFSPEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_cost(model(), "eager", COST)
    assert (tmp_path / "selfspec" / "costs.json").is_file()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification calls invalid
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kept_costs._path() == tmp_path / "home" / ".cache" / "selfspec" / "costs.json"
