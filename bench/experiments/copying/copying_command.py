"""`copying-texts` and `copying-accuracy`: teach a small model to copy, and measure how well it does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bench.commands.bench_options import ModelOption
from bench.commands.preparation import load_network, open_tokenizer, progress
from bench.datasets import group_by_task, load_prompts
from bench.experiments.copying.accuracy import CopyAccuracy, add_answer, total
from bench.experiments.copying.make_texts import held_out_prompts, read_passages, training_documents
from bench.report.table import Table, number, print_tables
from layerskip_models import DEMO_PATH
from layerskip_models.training.documents import END_OF_TEXT
from selfspec.cli.arguments import checked_output_folder
from selfspec.cli.notes import one_line_errors
from selfspec.engine.stats import ratio


def copying_texts(
    output_dir: Annotated[
        Path, typer.Argument(help="Folder for train.txt and prompts.jsonl.", callback=checked_output_folder)
    ],
    documents: Annotated[int, typer.Option(min=1, help="Number of documents to train on.")] = 6000,
    prompts: Annotated[int, typer.Option(min=1, help="Number of held-out prompts, the tasks taking turns.")] = 50,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    repetitions: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the documents that only repeat a run of words.")
    ] = 0.25,
    longest: Annotated[int, typer.Option(min=12, help="Number of words of such a document, about.")] = 200,
    passages: Annotated[
        list[Path] | None,
        typer.Option(help="File of text, .txt or .txt.gz, from which passages and words are taken; repeatable."),
    ] = None,
) -> None:
    """Write texts that teach a small model to copy, and held-out prompts with other names, words and passages.

    The tasks: repeat a text with a name replaced, quote from documents, edit a small file of code, go on with rows that
    come back, and write records in another format. The same options give the same files.
    """
    with one_line_errors():
        train = training_documents(documents, seed, read_passages(passages or [], False), repetitions, longest)
        text = "".join(f"{document.rstrip()}\n{END_OF_TEXT}\n" for document in train)
        prompt_set = held_out_prompts(prompts, seed, read_passages(passages or [], True))
        lines = [json.dumps(asdict(prompt), ensure_ascii=False) for prompt in prompt_set]
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / "train.txt").write_text(text, encoding="utf-8")
        (output_dir / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    typer.echo(f"wrote {documents} documents ({len(text):,} characters) and {prompts} prompts to {output_dir}")


def copying_accuracy(
    prompts: Annotated[Path, typer.Argument(help='Prompts with answers: .jsonl[.gz], the answers as "reference".')],
    model: ModelOption = None,
    own_text: Annotated[
        bool, typer.Option("--own-text/--no-own-text", help="Also let the model write the answers, greedily.")
    ] = True,
    num_samples: Annotated[
        int | None, typer.Option(min=1, help="Number of prompts of each task. Default: all.")
    ] = None,
) -> None:
    """Measure how well a model copies: the share of the answers' tokens that it gets right, per task and exit layer."""
    with one_line_errors():
        checkpoint = str(model or DEMO_PATH)
        tasks = group_by_task([prompt for prompt in load_prompts(prompts) if prompt.reference])
        if not tasks:
            raise ValueError(f"{prompts} has no prompt with an answer to compare with")
        tokenizer = open_tokenizer(checkpoint)
        network = load_network(checkpoint, "float32", "auto").eval()
    chosen = [(task, prompt) for task, group in tasks.items() for prompt in group[:num_samples]]
    sums: dict[str, CopyAccuracy] = {task: CopyAccuracy() for task in tasks}
    with progress(len(chosen)) as advance:
        for task, prompt in chosen:
            asked, answer = (tokenizer(text, verbose=False)["input_ids"] for text in (prompt.prompt, prompt.reference))
            add_answer(sums[task], network, asked, answer, own_text)
            advance(task)
    print_tables([_by_task(sums, own_text), _by_exit_layer(sums)])


def _by_task(sums: Mapping[str, CopyAccuracy], own_text: bool) -> Table:
    columns = ["task", "prompts", "tokens of the answers", "right", "copied tokens", "of these right"]
    columns += ["right in own text", "whole answers"] if own_text else []
    rows = []
    for task, sum_ in {**sums, "all": total(sums.values())}.items():
        row = [task, str(sum_.num_prompts), str(sum_.num_tokens), _share(sum_.num_right[-1], sum_.num_tokens)]
        row += [str(sum_.num_copied), _share(sum_.num_copied_right[-1], sum_.num_copied)]
        row += [_share(sum_.num_own_right, sum_.num_tokens), str(sum_.num_own_whole)] if own_text else []
        rows.append(tuple(row))
    return Table(name="copying", title="How well the answers are copied", columns=tuple(columns), rows=tuple(rows))


def _by_exit_layer(sums: Mapping[str, CopyAccuracy]) -> Table:
    everything = total(sums.values())
    shown = {**sums, "all": everything}
    rows = tuple(
        (str(layer + 1), *(_share(sum_.num_copied_right[layer], sum_.num_copied) for sum_ in shown.values()))
        for layer in range(len(everything.num_right))
    )
    title = "Copied tokens that each exit predicts"
    return Table(name="copying_exits", title=title, columns=("exit_layer", *shown), rows=rows)


def _share(part: int, whole: int) -> str:
    return number(ratio(part, whole), "{:.3f}")
