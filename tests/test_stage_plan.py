"""What two stages hold, where, and with which adapters: every choice, and every refusal before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from staged_models import save_staged

from bench.trials.random_adapters import random_adapters
from layerskip_models import load_model
from layerskip_models.exits.adapter import ExitAdapters
from layerskip_models.exits.folder import CONFIG_FILE, config_for, save_adapters
from layerskip_models.kernels.check import native_works
from selfspec import SelfSpecGenerator
from selfspec.parallel import stage_plan
from selfspec.parallel.two_stages import TwoStages

CPUS: Any = ("cpu", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_staged(tmp_path_factory.mktemp("stages"))


def test_devices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [device.type for device in TwoStages(folder, 1).plan.devices] == ["cpu", "cpu"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(stage_plan, "resolve_device", torch.device)
    plan = TwoStages(folder, 2).plan
    assert [str(device) for device in plan.devices] == ["cuda:0", "cuda:1"]
    assert [str(stage.options["device"]) for stage in (plan.drafting, plan.verifying)] == ["cuda:0", "cuda:1"]
    assert [stage.layers for stage in (plan.drafting, plan.verifying)] == [range(2), range(2, 5)]
    assert plan.halves() is None
    assert [str(device) for device in TwoStages(folder, 2, devices=("cuda:1", "cpu")).plan.devices] == ["cuda:1", "cpu"]
    with pytest.raises(ValueError, match="a forked process cannot use a GPU"):
        TwoStages(folder, 2, start="fork")


def test_half_of_the_cores_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = TwoStages(folder, 2, devices=CPUS).plan
    for own, halves in (({3}, None), ({0, 2, 5}, ([0], [2, 5])), ({4, 1, 2, 3}, ([1, 2], [3, 4]))):
        monkeypatch.setattr(stage_plan.os, "sched_getaffinity", lambda process, own=own: own)
        assert plan.halves() == halves


def test_the_exit_that_is_chosen(folder: Path, tmp_path: Path) -> None:
    """The best known setting's, a quarter of the layers if none is known; with adapters, the nearest that has one."""
    assert TwoStages(folder, exits=None, devices=CPUS).plan.exit_layer == 1
    save_staged(tmp_path)
    for settings, exits, exit_layer in (("ls:4-3", None, 4), ("ls:4-3", "auto", 3), ("ls:2-1", "auto", 1)):
        (tmp_path / "selfspec.json").write_text(json.dumps({"policy": settings}), encoding="utf-8")
        plan = TwoStages(tmp_path, exits=exits, devices=CPUS).plan
        assert plan.exit_layer == exit_layer
        assert (plan.adapters is None) == (exits is None)


def test_adapters_of_another_folder(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder, dtype="float64", device="cpu")
    save_adapters(random_adapters(model, [2], seed=1), tmp_path)
    with TwoStages(folder, 2, dtype="float64", devices=CPUS, exits=tmp_path, start="fork") as stages:
        expected = SelfSpecGenerator(model).generate([5, 1], max_new_tokens=20, policy="ar").new_tokens
        assert stages.generate([5, 1], max_new_tokens=20).new_tokens == expected
    with pytest.raises(ValueError, match="holds adapters for exit layers 2, and none for 3"):
        TwoStages(folder, 3, exits=tmp_path)
    assert TwoStages(folder, 2).plan.adapters is None  # those beside the checkpoint are for 1 and 3


def test_adapters_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    other = load_model(folder, dtype="float64", device="cpu")
    with torch.no_grad():
        other._head.weight.mul_(torch.randn(other._head.weight.shape, dtype=torch.float64))  # type: ignore[attr-defined]
    save_adapters(random_adapters(other, [2]), tmp_path)
    with (
        pytest.raises(ValueError, match="whose weights are not those of"),
        TwoStages(folder, 2, dtype="float64", devices=CPUS, exits=tmp_path, start="fork"),
    ):
        pass
    values = json.loads((tmp_path / CONFIG_FILE).read_text(encoding="utf-8"))
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**values, "exit_layers": [2, 9]}), encoding="utf-8")
    with pytest.raises(ValueError, match="no exit adapters that can be read"):
        TwoStages(folder, 2, exits=tmp_path)
    steered = config_for(other, exit_layers=(2,), rank=5, form="steered", steering_layers=(4,))
    save_adapters(ExitAdapters(steered), tmp_path)
    with pytest.raises(
        ValueError, match="adapters of form 'steered', which are for measuring: drafts are made with form"
    ):
        TwoStages(folder, 2, exits=tmp_path)
    with pytest.raises(FileNotFoundError, match="no exit adapters at"):
        TwoStages(folder, 2, exits=tmp_path / "nowhere")


def test_what_cannot_be(folder: Path) -> None:
    for options, said in (
        ({"exit_layer": 5}, r"exit_layer must be in \[1, 4\]"),
        ({"lead": (0, 2)}, r"lead must be \(rows, ahead\)"),
        ({"devices": ("cpu",)}, "must be two, such as"),
        ({"devices": "cpu"}, "must be two, such as"),
        ({"devices": ("cpu", "cuda:99")}, "device 'cuda:99' is not available here"),
    ):
        with pytest.raises(ValueError, match=said):
            TwoStages(folder, **options)
    with (
        pytest.raises(ValueError, match="kv_dtype must be auto"),
        TwoStages(folder, 2, devices=CPUS, kv_dtype="float16", start="fork"),
    ):
        pass


@pytest.mark.skipif(not native_works(torch.device("cpu"), torch.float32), reason="no native kernels here")
@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"dtype": "int4"}, {"kv_dtype": "bfloat16"}], ids=str)
def test_fewer_bits(options: dict[str, Any], checkpoint: Path) -> None:
    """The same weights are rounded as in one process: bit for bit the same text."""
    generator = SelfSpecGenerator.from_pretrained(checkpoint, device="cpu", **options)
    with TwoStages(checkpoint, 2, devices=CPUS, start="fork", **options) as stages:
        for prompt in ([5, 1, 7], [2]):
            expected = generator.generate(prompt, max_new_tokens=24, policy="ar").new_tokens
            assert stages.generate(prompt, max_new_tokens=24).new_tokens == expected
