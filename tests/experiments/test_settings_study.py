"""Published settings beside ours: what is chosen, on which prompts, and the table of it."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from bench.experiments.__main__ import app
from bench.experiments.settings.arms import DEL, OURS, PUBLISHED, candidates, choose
from bench.record import read_record
from bench.report.markdown import markdown
from policies import parse_policy


def test_every_setting_is_a_policy() -> None:
    for patterns in (*PUBLISHED.values(), *OURS.values(), DEL):
        for name in candidates(patterns, [1, 3]):
            assert parse_policy(name, num_layers=4).name == name


def test_the_best_of_each_rule_is_chosen_and_every_published_tau() -> None:
    """A made-up eTPL that rises with the exit layer."""
    chosen = choose([1, 2], lambda name: float(name.partition(":")[2][0]))
    published = [one.policy for one in chosen if one.settings == "published"]
    assert [name for name in published if name.startswith("spide")] == [
        f"spide:2,tau={tau},bins=paper" for tau in (0.5, 0.6, 0.7, 0.8, 0.9)
    ]
    assert {"dv:2,start=0.8", "svip:2,threshold=0.6", "adaedl:2,start=0.4"} <= set(published)
    assert len([one for one in chosen if one.settings == "ours"]) == len(OURS)
    assert [one.policy for one in chosen if one.rule == "DEL"] == list(DEL)


def test_the_command(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "settings.jsonl"
    arguments = [
        "settings",
        "code",
        "--model",
        str(checkpoint),
        "--tuning",
        "1",
        "--num-samples",
        "1",
        "--prompt-tokens",
        "20",
        "--exit-layer",
        "2",
    ]
    result = CliRunner().invoke(app, [*arguments, "--max-new-tokens", "6", "-o", str(path)])
    assert result.exit_code == 0, result.output
    lines = read_record(path)
    scores = [line for line in lines if line["kind"] == "score"]
    assert {line["tokens"] for line in scores} == {5}
    assert not set(lines[0]["configuration"]["tuning_prompts"]) & {line["prompt"] for line in scores}
    tried = {line["policy"]: line["etpl"] for line in lines if line["kind"] == "tried"}
    ours = next(line["policy"] for line in scores if line["rule"] == "SVIP" and line["settings"] == "ours")
    assert tried[ours] == max(etpl for name, etpl in tried.items() if name.startswith("svip"))
    page = markdown(lines)
    assert "| `del` | DEL | – |" in page and "`del:on_stop=keep,prompt=counted`" in page
    sampled = CliRunner().invoke(app, [*arguments, "--max-new-tokens", "6", "--temperature", "1"])
    assert sampled.exit_code == 0 and "sampled at temperature 1" in " ".join(sampled.output.split())
