"""`selfspec-bench run` as tests call it, and what two records must have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from bench.commands.bench_app import app
from bench.record import Line

SMALL = ["--prompt-tokens", "10", "--max-new-tokens", "8", "--repeats", "2", "--warmups", "0", "--no-peers"]


def run(checkpoint: Path | str, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["run", "--model", str(checkpoint), *SMALL, *map(str, arguments)])


def counts(lines: list[Line]) -> list[Any]:
    """All of a record that does not depend on the clock. Costs are the clock's: cells keep tokens and layers."""
    found: list[Any] = []
    for line in lines:
        if line["kind"] == "sample":
            clock = [name for name in line["stats"] if "second" in name or name == "time_to_first_token"]
            stats = {name: value for name, value in line["stats"].items() if name not in clock}
            found.append((line["engine"], line["prompt"], line["repeat"], line["token_ids"], stats))
        elif line["kind"] == "output":
            found.append((line["engine"], *(line[name] for name in ("prompt", "output", "first_difference"))))
        elif line["kind"] == "grid":
            cells = {name: cell[:2] for name, cell in line["cells"].items()}
            found.append((line["prompt"], cells))
        elif line["kind"] not in ("run", "costs", "limits", "fixed"):
            found.append(line)
    return found
