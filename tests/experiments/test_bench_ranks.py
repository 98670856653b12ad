"""`python -m bench.experiments ranks`: its table by hand, and a run of it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from bench.experiments.__main__ import app
from bench.experiments.ranks.ranks_command import _Run, _table


def test_ratios_are_of_runs_that_followed_each_other() -> None:
    """Two texts of 11 tokens; the second pair ran while the machine was half as fast."""
    texts, other = [[1] * 11, [2] * 11], [[1] * 11, [3] * 11]
    runs = [
        (_Run(texts, prefill=1.0, decoding=2.0), _Run(texts, prefill=2.0, decoding=4.0, waiting=1.5)),
        (_Run(texts, prefill=2.0, decoding=4.0), _Run(other, prefill=4.0, decoding=8.0, waiting=3.0)),
        (_Run(texts, prefill=1.0, decoding=2.0), _Run(texts, prefill=2.0, decoding=5.0, waiting=1.75)),
    ]
    table = _table({"ar": runs}, ranks=2, cores=4, new=11)
    assert "2 of 4 cores each" in table.title
    assert table.rows == (("ar", "10.0", "4.0", "0.50", "0.50", "25%", "2 of 3"),)


@pytest.mark.slow
def test_a_run_on_the_demo() -> None:
    options = ["--repeats", "1", "--max-new-tokens", "8", "--num-samples", "1", "--policy", "ar", "--policy", "ls:4-3"]
    result = CliRunner().invoke(app, ["ranks", *options])
    assert result.exit_code == 0, result.output
    assert "1 of 1" in result.output
    wrong = CliRunner().invoke(app, ["ranks", "--tensor-parallel", "4096"])
    assert wrong.exit_code == 2
    assert "need a core each" in wrong.output
