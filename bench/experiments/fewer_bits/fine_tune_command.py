"""`python -m bench.experiments fine-tune`: do drafts in fewer bits follow a model that is trained?"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.commands.bench_options import OutputOption
from bench.commands.preparation import load_network, model_name, open_tokenizer, progress, recording, show
from bench.experiments.fewer_bits.fine_tuning import FineTuning
from bench.provenance import provenance
from bench.record import RecordWriter
from layerskip_models.training.examples import read_examples
from selfspec import SelfSpecGenerator
from selfspec.cli.arguments import one_line_errors
from selfspec.messages import OWN_TEMPLATE, conversation_ids


def fine_tune(
    model: Annotated[str, typer.Argument(help="Model with a chat template, as transformers runs it in float32.")],
    text: Annotated[Path, typer.Option(help="What it is trained on: .txt[.gz], .jsonl, or a folder.")],
    chats: Annotated[Path, typer.Option(help='Questions, .jsonl with "messages".')],
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimiser.")] = 100,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a step.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 5e-5,
    num_samples: Annotated[int, typer.Option(min=1, help="Questions.")] = 12,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens of an answer.")] = 96,
    output: OutputOption = None,
) -> None:
    """Train a transformers model for some steps, and count drafts that are accepted before and after.

    The generator notices by itself that the weights have changed. What copies of the old weights would get is counted, too.
    """
    with one_line_errors():
        network, tokenizer = load_network(model, "float32", "cpu"), open_tokenizer(model)
        ids = [token for one in read_examples(text, ()) if one.text for token in tokenizer(one.text)["input_ids"]]
        if len(ids) < steps * length:
            raise ValueError(f"{text} has {len(ids):,} tokens, and {steps} steps of {length} need {steps * length:,}")
        asked = [one.messages for one in read_examples(chats, ()) if one.messages][:num_samples]
        questions = [conversation_ids(one, tokenizer, OWN_TEMPLATE, ask=True) for one in asked]
        tuning = FineTuning(
            network=network,
            generator=SelfSpecGenerator(network, tokenizer, prefix_cache=0),
            rows=torch.tensor(ids[: steps * length]).view(steps, length),
            questions=questions,
            max_new_tokens=max_new_tokens,
            learning_rate=learning_rate,
        )
        configuration = {
            "model": model_name(model),
            "weights_digest": None,
            "prompts_digest": sha256(json.dumps(questions).encode()).hexdigest()[:12],
            "text": text.name,
            "questions": len(questions),
            "steps": steps,
            "length": length,
            "learning_rate": learning_rate,
            "max_new_tokens": max_new_tokens,
            "repeats": 1,
        }
        with progress(tuning.num_steps) as advance, recording(RecordWriter(output)) as record:
            record.write(
                {
                    "kind": "run",
                    "command": "fine-tune",
                    "configuration": configuration,
                    "provenance": provenance(torch.device("cpu"), torch.float32),
                }
            )
            for line in tuning.lines(advance):
                record.write(line)
    show(record.lines)
