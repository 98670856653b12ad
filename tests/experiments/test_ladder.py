"""The ladder: which checkpoints there are, how orders of policies are made and compared, and the command."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.experiments.__main__ import app
from bench.experiments.ladder.ladder_command import UNTUNED, replayed_settings
from bench.experiments.ladder.ladder_tables import CLAIMS, ladder_tables
from bench.experiments.ladder.orders import correlation, exchanged, looping_prompts, order_of
from bench.experiments.ladder.rungs import Rung, find_rungs
from bench.experiments.settings.arms import OURS, candidates
from bench.experiments.settings.settings_command import count
from bench.experiments.tuned_run import TunedRun
from bench.provenance import weights_digest
from bench.record import RecordWriter, read_record
from bench.report.markdown import markdown
from layerskip_models import DEMO_PATH
from layerskip_models.training.training_config import TrainingConfig
from tiny_training import tiny


def kept(folder: Path, *steps: int) -> Path:
    """The folder of a training that kept the demo's files after these steps of 64 tokens."""
    (folder / "steps").mkdir(parents=True)
    config = tiny(DEMO_PATH, folder)
    assert isinstance(config, TrainingConfig)
    (folder / "config.json").write_text(json.dumps(asdict(config)), encoding="utf-8")
    for step in steps:
        (folder / "steps" / str(step)).symlink_to(DEMO_PATH)
    return folder


def test_a_training_stands_for_the_models_it_kept(tmp_path: Path) -> None:
    """By step, not by the letters of their names: 64 tokens a step, so 62,500 steps are 4 M tokens."""
    rungs = find_rungs([DEMO_PATH, kept(tmp_path / "run", 62_500, 7_813)])
    assert [rung.name for rung in rungs] == [DEMO_PATH.name, "0.50 M", "4.00 M"]
    assert [rung.tokens for rung in rungs] == [None, 500_032, 4_000_000]
    assert rungs[0].training is None
    assert rungs[2].training is not None and rungs[2].training["num_layers"] == 4
    assert not any(str(tmp_path) in str(value) for value in rungs[2].training.values())
    assert find_rungs([tmp_path / "run" / "steps" / "62500"]) == rungs[2:]


def test_what_is_no_ladder_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than one checkpoint is called demo"):
        find_rungs([DEMO_PATH, DEMO_PATH])
    with pytest.raises(ValueError, match=r"neither a checkpoint nor a training that kept models: .* --keep-at"):
        find_rungs([tmp_path])
    (tmp_path / "checkpoints").mkdir()  # a training that kept none has a config.json, too
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="neither"):
        find_rungs([tmp_path])


LAYERS = {
    "early": {"LayerSkip": 40, "finite state": 20, "SPIDE": 80},
    "late": {"LayerSkip": 40, "finite state": 80, "SPIDE": 160},
}


def made_up(num_prompts: int, num_loops: int = 0) -> list[dict[str, Any]]:
    """Eight layers and 10 tokens a prompt, so plain decoding loads 80 layers; the last num_loops texts of "late" loop."""
    lines: list[dict[str, Any]] = [
        {
            "kind": "run",
            "command": "ladder",
            "configuration": {"tuning_prompts": ["t"], "rungs": ["early", "late"]},
            "provenance": {"dtype": "float32", "cpu": "a CPU"},
        }
    ]
    for rung, by_rule in LAYERS.items():
        for rule, layers in by_rule.items():
            lines.append({"kind": "chosen", "rung": rung, "rule": rule, "policy": "ls:1-1", "etpl": 0.1})
            for place in range(num_prompts):
                lines.append(
                    {
                        "kind": "score",
                        "rung": rung,
                        "rule": rule,
                        "prompt": f"p{place}",
                        "task": "code",
                        "tokens": 10,
                        "layers": layers,
                        "looping": rung == "late" and place >= num_prompts - num_loops,
                    }
                )
        lines.append(
            {
                "kind": "rung",
                "rung": rung,
                "num_layers": 8,
                "texts": num_prompts,
                "looping": num_loops if rung == "late" else 0,
                "loss": None if rung == "early" else [4.0] * 7 + [3.0],
                "agreement": None if rung == "early" else [0.5, 0.25] + [1.0] * 6,
                "own_agreement": [0.75] * 7,
                "own_agreement_free": None,
            }
        )
    return lines


def test_orders_by_hand() -> None:
    early, late = order_of(made_up(6), "early"), order_of(made_up(6), "late")
    assert early is not None and late is not None
    assert early.rates() == {"LayerSkip": 2.0, "finite state": 4.0, "SPIDE": 1.0}
    assert late.rates() == {"LayerSkip": 2.0, "finite state": 1.0, "SPIDE": 0.5}
    assert early.ratio("finite state", "LayerSkip") == "2.00 (2.00–2.00)"  # every prompt has the same ratio
    assert exchanged(early, late) == (1, 3)  # LayerSkip and finite state
    # Places 2, 1, 3 and 1, 2, 3: rho = 1 - 6 (1 + 1 + 0) / (3 (9 - 1))
    assert correlation(early, late) == "0.50 (0.50–0.50)"


def test_texts_that_loop_are_left_out() -> None:
    lines = made_up(8, num_loops=2)
    assert looping_prompts(lines, "early") == set()
    loops = looping_prompts(lines, "late")
    assert loops == {"p6", "p7"}
    free = order_of(lines, "late", loops)
    assert free is not None and free.prompts == ("p0", "p1", "p2", "p3", "p4", "p5")
    assert order_of(lines, "late", loops | {"p0"}) is None  # five prompts tell nothing


def test_tables() -> None:
    tables = {table.name: table for table in ladder_tables(made_up(8, num_loops=3))}
    assert tables["ladder_order"].rows == (
        ("LayerSkip", "2.000 (2)", "2.000 (1)"),
        ("finite state", "4.000 (1)", "1.000 (2)"),
        ("SPIDE", "1.000 (3)", "0.500 (3)"),
    )
    assert ("finite state / LayerSkip", "2.00 (2.00–2.00)", "0.50 (0.50–0.50)") in tables["ladder_claims"].rows
    assert tables["ladder_order_free"].rows[0] == ("finite state", "4.000 (1)", "–")
    assert tables["ladder_order_free"].columns == ("rule", "early: 8 texts", "late")
    assert tables["ladder_ranks"].rows == (("early", "late", "0.50 (0.50–0.50)", "1 of 3", "–", "–"),)
    early, late = (dict(zip(tables["ladder_rungs"].columns, row)) for row in tables["ladder_rungs"].rows)
    assert (early["loss"], late["loss"], late["texts that loop"]) == ("–", "3.000", "0.38")
    assert (late["held-out text, exit 1"], late["held-out text, exit L/4"]) == ("0.50", "0.25")


def test_claims_are_of_rules_that_are_measured() -> None:
    assert {rule for pair in CLAIMS for rule in pair} <= {*OURS, *UNTUNED}


def test_the_command(tmp_path: Path) -> None:
    text = tmp_path / "texts.txt"
    documents = [f"{number} and {number} make {2 * number}.\n" * 12 for number in range(500)]
    text.write_text("<|endoftext|>\n".join(documents), encoding="utf-8")
    path = tmp_path / "ladder.jsonl"
    options = "--tuning 1 --num-samples 1 --prompt-tokens 20 --exit-layer 2 --max-new-tokens 6 --max-text-tokens 300"
    run = str(kept(tmp_path / "run", 5))
    result = CliRunner().invoke(
        app, ["ladder", run, "--prompts", "code", "--text", str(text), *options.split(), "-o", str(path)]
    )
    assert result.exit_code == 0, result.output
    lines = read_record(path)
    scores = [line for line in lines if line["kind"] == "score"]
    assert [line["rule"] for line in scores] == [*OURS, *UNTUNED]
    assert {line["tokens"] for line in scores} == {5}
    assert not set(lines[0]["configuration"]["tuning_prompts"]) & {line["prompt"] for line in scores}
    (rung,) = [line for line in lines if line["kind"] == "rung"]
    assert rung["tokens"] == 320 and len(rung["loss"]) == 16 and rung["agreement"][-1] == 1
    assert len(rung["own_agreement"]) == 15 and rung["texts"] == 1
    assert "| checkpoint | loss |" in markdown(lines)


def test_a_record_goes_on_with_new_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the new one is measured; the rows are in the order of the checkpoints, and other options are refused."""
    path, run = tmp_path / "ladder.jsonl", kept(tmp_path / "run", 15_625)
    measured = []

    def measure(run: object, rung: Rung, about: object, max_new_tokens: object, record: RecordWriter) -> None:
        measured.append(rung.name)
        record.write({**made_up(1)[-1], "rung": rung.name, "weights_digest": weights_digest(rung.path)})

    monkeypatch.setattr("bench.experiments.ladder.ladder_command.measure", measure)
    command = ["ladder", str(run), "--prompts", "code", "--tuning", "1", "--num-samples", "1", "-o", str(path)]
    assert CliRunner().invoke(app, command).exit_code == 0
    (run / "steps" / "7813").symlink_to(DEMO_PATH)
    assert CliRunner().invoke(app, [*command, "--resume"]).exit_code == 0
    assert measured == ["1.00 M", "0.50 M"]
    lines = read_record(path)
    assert [line["rung"] for line in lines[1:]] == ["1.00 M", "0.50 M"]
    assert [row[0] for row in ladder_tables(lines)[0].rows] == ["0.50 M", "1.00 M"]
    other = CliRunner().invoke(app, [*command, "--resume", "--max-new-tokens", "9"])
    assert other.exit_code == 2 and "made with another max_new_tokens" in other.stderr


def test_fixed_lengths_are_replayed_as_they_are_decoded() -> None:
    run = TunedRun.prepare(None, "float32", [Path("code")], 1, 1, 20, [2])
    replayed = replayed_settings(run, 12)
    assert list(replayed) == candidates(OURS["LayerSkip"], [2])
    for name, etpl in replayed.items():
        (line,) = (count(run.generator, name, sample, 12, 0.0) for sample in run.tuning)
        assert etpl == line["tokens"] / line["layers"]
