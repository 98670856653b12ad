"""`python -m bench.experiments row-parts`: how many parts a row needs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.commands.bench_options import OutputOption
from bench.commands.preparation import model_name, progress, recording, show
from bench.datasets import digest, encode_prompts, load_prompts, select_prompts
from bench.experiments.row_parts.row_parts import WAYS, CutRows, Difference, round_weights
from bench.provenance import provenance
from bench.record import RecordWriter
from layerskip_models import DEMO_PATH, load_tokenizer
from layerskip_models.checkpoints.loading import load_transformers
from selfspec import SelfSpecGenerator
from selfspec.cli.notes import one_line_errors


def row_parts(
    model: Annotated[str, typer.Argument(help="Folder, file or name of a model.")] = str(DEMO_PATH),
    prompts: Annotated[
        list[Path] | None, typer.Option(help="Prompts, .jsonl[.gz]; repeatable. Default: the shipped ones.")
    ] = None,
    num_texts: Annotated[int, typer.Option(min=1, help="Texts, the tasks taking turns.")] = 500,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of a longer prompt the last ones.")] = 128,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Greedy tokens of each text.")] = 64,
    weights: Annotated[
        str, typer.Option(help="How weights are kept: bfloat16, int8, or both with a comma.")
    ] = "bfloat16,int8",
    output: OutputOption = None,
) -> None:
    """Count what cutting rows into parts changes in a model's own greedy texts, beside float32 and float64."""
    with one_line_errors():
        kinds = weights.split(",")
        if unknown := [kind for kind in kinds if kind not in WAYS]:
            raise ValueError(f"--weights must be of {', '.join(WAYS)}, got {unknown[0]}")
        tokenizer = load_tokenizer(model)
        found = [prompt for path in prompts or () for prompt in load_prompts(path)] or load_prompts()
        encoded = encode_prompts(select_prompts(found, num_texts), tokenizer, prompt_tokens)
        with recording(RecordWriter(output)) as record, progress(2 * len(encoded) * len(kinds)) as advance:
            record.write(
                {
                    "kind": "run",
                    "command": "row-parts",
                    "configuration": {
                        "model": model_name(model),
                        "texts": len(encoded),
                        "max_new_tokens": max_new_tokens,
                        "repeats": 1,
                        "prompts_digest": digest(encoded),
                        "weights_digest": None,
                    },
                    "engines": {},
                    "provenance": provenance(torch.device("cpu"), torch.float32),
                }
            )
            for kind in kinds:
                network = load_transformers(model, dtype="float32", device="cpu")
                round_weights(network, kind)
                generator = SelfSpecGenerator(network)
                texts: list[list[int]] = []
                for each in encoded:
                    result = generator.generate(each.ids, max_new_tokens=max_new_tokens, eos_token_id=[])
                    texts.append([*each.ids.tolist(), *result.new_tokens])
                    advance("texts")
                del generator
                subject, ways = CutRows(network), WAYS[kind]
                counted = {name: Difference() for name in ways}
                for text in texts:
                    exact = subject.distributions(text, max_new_tokens, None, exact=True)
                    for name, cut in ways.items():
                        counted[name].add(subject.distributions(text, max_new_tokens, cut), exact)
                    advance(kind)
                for name, difference in counted.items():
                    record.write(
                        {"kind": "way", "weights": kind, "rows": name, **asdict(difference), "peak": subject.peak}
                    )
    show(record.lines)
