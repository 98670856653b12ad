"""`judge-exits`: what exits of a real model gain on held-out questions, and what a smaller draft head would."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import PreTrainedTokenizerBase

from bench.commands.bench_options import DtypeOption, OutputOption, RepeatsOption
from bench.commands.preparation import model_name, open_model, open_tokenizer, progress, recording, show
from bench.datasets import EncodedPrompt, digest
from bench.experiments.exit_adapters.judged_exits import JudgedExits, answers_of
from bench.provenance import provenance
from bench.record import RecordWriter
from layerskip_models.checkpoints.fingerprint import fingerprint
from layerskip_models.exits.folder import check_fits, check_unsteered, load_adapters
from layerskip_models.training.examples import read_examples
from selfspec.cli.arguments import one_line_errors
from selfspec.messages import OWN_TEMPLATE, conversation_ids


def judge_exits(
    model: Annotated[str, typer.Argument(help="Model whose exits are judged, with a chat template.")],
    chats: Annotated[Path, typer.Option(help='Held-out questions, .jsonl with "messages".')],
    exits: Annotated[
        Path | None, typer.Option(help="Folder of adapters, from train-exit. Default: bare exits.")
    ] = None,
    training_chats: Annotated[
        Path | None,
        typer.Option(help="Other questions. The likeliest tokens of the answers to them make smaller draft heads."),
    ] = None,
    num_training: Annotated[int, typer.Option(min=1, help="Questions of these that are answered.")] = 200,
    exit_layer: Annotated[list[int] | None, typer.Option(help="Exit; repeatable. Default: the adapters'.")] = None,
    head_rows: Annotated[
        list[int] | None, typer.Option(help="Rows of a draft head; repeatable. Needs --training-chats.")
    ] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="Questions.")] = 24,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens of an answer; EOS ends it.")] = 128,
    repeats: RepeatsOption = 3,
    speed: Annotated[bool, typer.Option(help="Also measure tokens per second.")] = True,
    dtype: DtypeOption = "auto",
    output: OutputOption = None,
) -> None:
    """Agreement, tokens per layer, tokens per measured cost and speed of a chat model's exits, bare and adapted.

    Drafts are replayed on the model's own greedy answers. Smaller draft heads, over the likeliest tokens of the training
    answers, are counted and not run: each line says at which agreement an exit would gain a tenth.
    """
    with one_line_errors():
        if head_rows and training_chats is None:
            raise ValueError("--head-rows needs --training-chats, whose answers' likeliest tokens the rows are")
        network, tokenizer = open_model(model, dtype, "cpu").with_adapters({}), open_tokenizer(model)
        adapters = None if exits is None else load_adapters(exits)
        if adapters is not None and exits is not None:
            check_fits(adapters.config, network, exits)
            check_unsteered(adapters.config, exits, "this study")
        layers = tuple(exit_layer or (adapters.config.exit_layers if adapters is not None else ()))
        if not layers:
            raise ValueError("name exits with --exit-layer, or adapters with --exits")
        asked = questions(chats, tokenizer, num_samples)
        others = [] if training_chats is None else questions(training_chats, tokenizer, num_training)
        with progress(2) as advance:
            judged = JudgedExits.of(network, adapters, layers, [one.ids for one in asked], max_new_tokens)
            written = answers_of(network, [one.ids for one in others], max_new_tokens)
            advance("answers")
            with recording(RecordWriter(output)) as record:
                record.write(
                    {
                        "kind": "run",
                        "command": "judge-exits",
                        "configuration": {
                            "model": model_name(model),
                            "num_layers": network.num_layers,
                            "questions": len(asked),
                            "prompts_digest": digest(asked),
                            "weights_digest": sha256(json.dumps(fingerprint(network)).encode()).hexdigest()[:12],
                            "answer_tokens": sum(map(len, judged.answers)),
                            "max_new_tokens": max_new_tokens,
                            "counted_tokens": sum(map(len, written)),
                            "repeats": repeats if speed else 1,
                        },
                        "provenance": provenance(network.device, network.dtype),
                    }
                )
                best: dict[str, tuple[float, str]] = {}
                for line in judged.exits(head_rows or [], written):
                    record.write(line)
                    if line["kind"] == "exit" and line["rows"] == network.vocab_size:
                        setting = line["gain"], f"ls:{line['exit_layer']}-{line['num_speculations']}"
                        best[line["exits"]] = max(best.get(line["exits"], setting), setting)
                for line in judged.auto_by_layers():
                    record.write(line)
                if speed:
                    for line in judged.speeds({which: policy for which, (_, policy) in best.items()}, repeats):
                        record.write(line)
                advance("exits")
    show(record.lines)


def questions(path: Path, tokenizer: PreTrainedTokenizerBase, number: int) -> list[EncodedPrompt]:
    """The first questions of a file, as the tokenizer's chat template asks them."""
    found = [example.messages for example in read_examples(path, ()) if example.messages][:number]
    return [
        EncodedPrompt(
            id=str(place), task="chat", ids=torch.tensor(conversation_ids(one, tokenizer, OWN_TEMPLATE, ask=True))
        )
        for place, one in enumerate(found)
    ]
