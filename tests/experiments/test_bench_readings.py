"""Readings of recorded traces, by hand and against real runs."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bench.datasets import EncodedPrompt
from bench.experiments.__main__ import app
from bench.experiments.readings.reading_tables import reading_tables
from bench.experiments.readings.readings import (
    Traces,
    acceptance_by_position,
    accepted_ahead,
    best_of,
    cheapest_cost,
    fixed_costs,
    longest_drafts,
    oracle_lengths,
    segments,
    transfer,
)
from bench.grid import grid_line
from bench.report.figures import figures
from policies import LayerCost, MeasuredCost
from selfspec.analysis.replay import AgreementTrace, replay, trace_agreement
from tiny_llama import tiny_llama

COST = MeasuredCost(num_layers=4, layer_seconds=(1.0, 1.0), head_seconds=(0.5, 0.5))


def trace(num_layers: int = 4, **rows: str) -> AgreementTrace:
    agrees = {int(name.removeprefix("layer")): tuple(map(float, row)) for name, row in rows.items()}
    size = len(next(iter(agrees.values())))
    return AgreementTrace(tokens=(0,) * (size + 1), agrees=agrees, num_layers=num_layers)


def traces(**by_prompt: AgreementTrace) -> Traces:
    return Traces(by_prompt=by_prompt, tasks={name: name[0] for name in by_prompt}, cost=LayerCost(4))


def test_transfer_by_hand() -> None:
    """Tokens per second of a: 10 with x, 5 with y; of b: 2 and 8. Together x has 26 tokens in 9 s, y in 4."""
    grid: list[dict[str, Any]] = [
        {"kind": "grid", "prompt": "1", "task": "a", "cells": {"x": [10, 1, 1.0], "y": [10, 1, 2.0]}},
        {"kind": "grid", "prompt": "2", "task": "b", "cells": {"x": [16, 1, 8.0], "y": [16, 1, 2.0]}},
    ]
    found = transfer(grid)
    assert found.settings == {"a": "x", "b": "y", "all": "y"}
    assert found.kept == {
        ("a", "a"): 1.0, ("a", "b"): 0.25, ("b", "a"): 0.5, ("b", "b"): 1.0, ("all", "a"): 0.5, ("all", "b"): 1.0,
    }  # fmt: skip


def test_oracle_lengths_by_hand() -> None:
    """1 1 0 1 0 0: the round from the first token drafts 2 and gets 3 tokens; from there 1 (2 tokens); then 0 (1 token)."""
    text = trace(layer1="110100")
    assert accepted_ahead(text, 1) == [2, 1, 0, 1, 0, 0]
    assert list(longest_drafts([2, 1, 0, 1, 0, 0])) == [2, 1, 0]
    assert accepted_ahead(trace(layer1="111"), 1) == [2, 1, 0]  # the last token is the target's own
    found = oracle_lengths(traces(a=text), 1)
    assert found.lengths == ((2, 1, 0),)
    # 6 tokens: plain 24 layers, oracle 3 drafts and 3 verifications, 15; the best fixed length is 2: rounds of 3, 2 and 1
    # tokens draft 2, 2 and 0 of which the end of the text allows: 4 + 12 = 16. Length 1: 1, 1, 1, 0 drafted, 3 + 16 = 19.
    assert found.longest == 24 / 15
    assert (found.fixed_length, found.fixed) == (2, 24 / 16)
    assert found.longest_passes == (50.0, 50.0)
    assert found.fixed_passes == (pytest.approx(400 / 6), 50.0)


rows_of_bits = st.lists(st.booleans(), min_size=1, max_size=5).map(lambda row: "".join("1" if x else "0" for x in row))


@settings(max_examples=60, deadline=None)
@given(rows_of_bits)
def test_the_cheapest_lengths_are_the_cheapest_of_all(row: str) -> None:
    """Against every sequence of lengths; a price per row to verify, so that the longest draft is not always the cheapest."""
    cost = MeasuredCost(num_layers=4, layer_seconds=(1.0, 1.4, 2.0), head_seconds=(0.5, 1.0, 1.5))
    ahead = accepted_ahead(trace(layer1=row), 1)
    lowest = float("inf")
    for lengths in product(range(max(ahead) + 1), repeat=len(ahead)):
        place, spent = 0, 0.0
        for length in lengths:
            if place >= len(ahead) or length > ahead[place]:
                break
            spent += cost.round(1, length) if length else cost.autoregressive()
            place += length + 1
        if place >= len(ahead):
            lowest = min(lowest, spent)
    found = cheapest_cost(ahead, cost, 1)
    assert found == pytest.approx(lowest)
    longest = sum(cost.round(1, n) if n else cost.autoregressive() for n in longest_drafts(ahead))
    fixed = [replay(trace(layer1=row), 1, n).cost(cost) for n in (1, 2, 3)]
    assert found <= longest + 1e-9
    assert found <= min(fixed) + 1e-9


def test_acceptance_by_position_by_hand() -> None:
    """1 1 0 1 from its four starts: first token right 3 of 4; two right 1 of 3 (11, 10, 01); three right 0 of 2."""
    found = acceptance_by_position(traces(a=trace(layer1="1101")), 1, 4)
    assert found.accepted == (3 / 4, 1 / 3, 0.0, 0.0)
    # The second among those whose first is right and that have a second: 11 and 10. The third: 110. The fourth: none.
    assert found.conditional == (3 / 4, 1 / 2, 0.0, None)


def test_segments_by_hand() -> None:
    """Layer 1 is right in the first and third part and wrong in the second, layer 2 the other way round."""
    first, second = "1" * 7 + "0" * 8 + "1" * 8, "0" * 7 + "1" * 8 + "0" * 8
    found = segments(traces(a=trace(layer1=first, layer2=second)), 8)
    assert [(part.prompt, part.number) for part in found] == [("a", 0), ("a", 1), ("a", 2)]
    assert found[0].best[0] == 1
    assert found[1].best[0] == 2
    # All 7 positions of the first segment right at layer 1: 6 drafts and a token, 6 + 4 layers; the second has 8 positions.
    assert found[0].cells[1, 8] == (7, 10.0)
    assert found[1].cells[2, 8] == (8, 7 * 2 + 4.0)
    assert found[1].cells[1, 1] == (8, 7 * 5 + 4.0)  # nothing is accepted; the last round has nothing left to draft
    assert best_of(found) in found[0].cells
    longer = traces(a=trace(layer1=first), b=trace(layer1=first[:-1]))
    with pytest.raises(
        ValueError, match=r"need texts of at least 24, and the shortest here has 23: .*tokens 24 or more"
    ):
        segments(longer, 8)
    with pytest.raises(ValueError, match="at least 2 tokens"):
        segments(traces(a=trace(layer1="11")), 1)


@pytest.fixture(scope="module")
def record() -> list[dict[str, Any]]:
    """A record's lines about two real texts of a tiny model."""
    import torch

    from layerskip_models import from_transformers
    from selfspec import SelfSpecGenerator

    generator = SelfSpecGenerator(from_transformers(tiny_llama(seed=3)))
    lines: list[dict[str, Any]] = [
        {"kind": "run", "command": "run", "engines": {}, "configuration": {"num_layers": 4}},
        {"kind": "costs", **COST.as_dict()},
    ]
    for number, ids in enumerate(([1, 2, 3], [7, 8, 9])):
        prompt = EncodedPrompt(id=f"p{number}", task="ab"[number], ids=torch.tensor(ids))
        lines.append(grid_line(prompt, trace_agreement(generator, prompt.ids, 24), range(1, 9), COST))
    return json.loads(json.dumps(lines))  # as a file gives them back


def test_a_record_gives_its_traces_back(record: list[dict[str, Any]]) -> None:
    found = Traces.of(record)
    assert found is not None
    assert found.cost == COST
    for line in record[2:]:
        text = found.by_prompt[line["prompt"]]
        assert len(text.tokens) == 24
        for name, (tokens, layers, seconds) in line["cells"].items():
            exit_layer, length = map(int, name.removeprefix("ls:").split("-"))
            rounds = replay(text, exit_layer, length)
            assert fixed_costs([text], exit_layer, COST)[0, length - 1] == pytest.approx(rounds.cost(COST))
            assert (rounds.num_tokens, rounds.loaded_layers) == (tokens, layers)
            assert rounds.cost(COST) == pytest.approx(seconds)
    assert Traces.of([record[0], record[1]]) is None


@pytest.mark.usefixtures("with_studies")
def test_all_readings_of_a_record(record: list[dict[str, Any]]) -> None:
    tables = {table.name: table for table in reading_tables(record, 8)}
    assert list(tables) == ["transfer", "segments", "oracle", "positions", "conditional"]
    assert [row[0][0] for row in tables["transfer"].rows] == ["a", "b", "a"]  # a, b, all
    assert tables["transfer"].rows[0][1] == tables["transfer"].rows[1][2] == "100"
    assert [row[1] for row in tables["segments"].rows] == ["3", "3", "6"]
    assert [row[0] for row in tables["oracle"].rows] == ["1", "2"]
    for row in tables["oracle"].rows:
        fixed, longest, cheapest = (float(cell.split()[0]) for cell in row[1:4])
        assert cheapest >= max(fixed, longest)
    assert [len(row) for row in tables["positions"].rows] == [len(tables["positions"].columns)] * 2
    drawn = figures(record)
    assert "Transfer of a setting between tasks" in drawn["transfer"]
    assert "Oracle length per round" in drawn["oracle"]
    assert "Acceptance by position in the draft" in drawn["positions"]


def test_readings_of_a_file(record: list[dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in record), encoding="utf-8")
    result = CliRunner().invoke(app, ["readings", str(path), "--segment", "8"])
    assert result.exit_code == 0, result.output
    assert "Segments of 8 new tokens" in result.stdout
    assert result.stderr == ""
    assert "Oracle length" in result.stdout
    result = CliRunner().invoke(app, ["readings", str(path), "--segment", "9"])
    assert result.exit_code == 2
    assert result.stderr == (
        "error: --segment 9: 3 segments of 9 new tokens need texts of at least 27, and the shortest here has 24: measure "
        "with --max-new-tokens 27 or more\n"
    )
    result = CliRunner().invoke(app, ["readings", str(path)])
    assert result.exit_code == 0, result.output
    assert "Segments of" not in result.stdout
    assert "Oracle length" in result.stdout
    assert "segments are left out: 3 segments of 64 new tokens need texts of at least 192" in result.stderr
    path.write_text(json.dumps(record[0]) + "\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["readings", str(path)])
    assert result.exit_code == 2
    assert "holds no traces" in result.stderr
    assert result.stderr.count("\n") == 1
