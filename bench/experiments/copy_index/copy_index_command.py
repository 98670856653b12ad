"""`python -m bench.experiments copy-index`: what keeping the index of copied drafts costs."""

from __future__ import annotations

from typing import Annotated

import typer

from bench.commands.preparation import open_tokenizer
from bench.datasets import load_prompts
from bench.experiments.copy_index.index_cost import microseconds_per_token, texts
from bench.report.table import Table, print_tables
from bench.sweep import parse_range
from layerskip_models import DEMO_PATH
from selfspec.cli.notes import one_line_errors


def copy_index(
    lengths: Annotated[str, typer.Option(help="Tokens of the prompt, for example 1024,16384.")] = "1024,16384",
) -> None:
    """Time the index of copied drafts: microseconds for each committed token, behind prompts of several lengths."""
    with one_line_errors():
        chosen = parse_range(lengths, "--lengths")
        tokenizer = open_tokenizer(str(DEMO_PATH))
        words = [token for prompt in load_prompts() for token in tokenizer(prompt.prompt)["input_ids"]]
    rows = []
    for length in chosen:
        for kind, text in texts(length, words).items():
            read, committed = microseconds_per_token(text)
            rows.append((str(length), kind, f"{read:.2f}", f"{committed:.1f}"))
    columns = ("tokens of the prompt", "kind", "µs per token of the prompt", "µs per committed token")
    print_tables([Table(name="copy_index", title="Keeping the index", columns=columns, rows=tuple(rows))])
