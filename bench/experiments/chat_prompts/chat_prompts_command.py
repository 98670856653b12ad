"""`chat-prompts`: write the messages of `kinds` to a file for `selfspec-bench chat`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bench.datasets import load_prompts
from bench.experiments.chat_prompts.kinds import SETS, chat_messages
from layerskip_models.output_paths import output_file
from selfspec.cli.arguments import checked_output_file, one_line_errors


def chat_prompts(
    folder: Annotated[
        Path, typer.Argument(help='Folder with the sets, each NAME.jsonl.gz with "id", "task", "prompt" in a line.')
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write, .jsonl.", callback=checked_output_file)
    ],
) -> None:
    """Write messages to a chat model, from the prompts of Spec-Bench (mt_bench, qa, summarization, rag) and humaneval: free
    answers, summaries and edits, code, and questions on a document."""
    with one_line_errors():
        sets = {name: load_prompts(folder / f"{name}.jsonl.gz") for name in SETS}
        messages = chat_messages(sets)
        path = output_file(output, replaced=True)
        lines = [json.dumps(asdict(message), ensure_ascii=False) for message in messages]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    typer.echo(f"wrote {len(messages)} messages to {path}")
