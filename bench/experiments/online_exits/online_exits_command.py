"""`online-exits`: exit adapters that learn from a stream of one kind of answers, against those that it began with."""

from __future__ import annotations

import copy
import json
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.commands.bench_options import DtypeOption, OutputOption
from bench.commands.preparation import model_name, open_model, open_tokenizer, progress, recording, show
from bench.experiments.online_exits.answer_rows import AnswerFiles
from bench.experiments.online_exits.stream import OnlineStream, with_exits_only
from bench.provenance import provenance
from bench.record import RecordWriter
from layerskip_models.checkpoints.fingerprint import fingerprint
from layerskip_models.exits.folder import check_fits, check_unsteered, load_adapters
from layerskip_models.exits.lean import lean_adapters
from layerskip_models.output_paths import output_folder
from layerskip_models.training.examples import read_examples
from selfspec import SelfSpecGenerator
from selfspec.cli.notes import one_line_errors
from selfspec.engine.online_exits import OnlineExits
from selfspec.exits.learning import ExitLearner, LearnSettings
from selfspec.messages import OWN_TEMPLATE, conversation_ids


def online_exits(
    model: Annotated[str, typer.Argument(help="Model with a chat template.")],
    chats: Annotated[Path, typer.Option(help='Questions of one kind, .jsonl with "messages", in the stream\'s order.')],
    exits: Annotated[Path, typer.Option(help="Folder of the adapters to begin with, from train-exit.")],
    work: Annotated[Path, typer.Option(help="Folder for the answers. Those in it are not written again.")],
    exit_layer: Annotated[list[int] | None, typer.Option(help="Exit; repeatable. Default: the adapters'.")] = None,
    num_answers: Annotated[int, typer.Option(min=1, help="Answers of the stream.")] = 2000,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens of an answer; EOS ends it.")] = 64,
    block: Annotated[int, typer.Option(min=1, help="Answers between two times of learning.")] = 25,
    passes: Annotated[
        float, typer.Option(help="How often a row is learned from, on average.")
    ] = LearnSettings().passes,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = LearnSettings().learning_rate,
    rows_mb: Annotated[int, typer.Option(min=1, help="Memory for rows, in MiB.")] = LearnSettings().num_bytes >> 20,
    dtype: DtypeOption = "auto",
    output: OutputOption = None,
) -> None:
    """Agreement and tokens per layer along a stream of answers, with adapters that stay and with adapters that learn.

    Each block of answers is judged before it is learned from. Run the same command again after an interruption: no answer is
    written twice, and learning, which is a function of the answers, begins anew.
    """
    with one_line_errors():
        output_folder(work)
        network, tokenizer = open_model(model, dtype, "cpu").with_adapters({}), open_tokenizer(model)
        static = load_adapters(exits)
        check_fits(static.config, network, exits)
        check_unsteered(static.config, exits, "this study")
        static = with_exits_only(static, exit_layer or static.exit_layers)
        settings = LearnSettings(num_bytes=rows_mb << 20, passes=passes, learning_rate=learning_rate)
        current = copy.deepcopy(static)
        adapters = lean_adapters(current, network)
        drafting = network.with_adapters(adapters)
        online = OnlineExits(drafting, adapters, num_bytes=settings.num_bytes, rows_per_text=settings.rows_per_text)
        learner = ExitLearner(
            drafting, online, start=static, current=current, folder=output_folder(work / "learned"), settings=settings
        )
        asked = [one.messages for one in read_examples(chats, ()) if one.messages][:num_answers]
        prompts = [conversation_ids(one, tokenizer, OWN_TEMPLATE, ask=True) for one in asked]
        writer = SelfSpecGenerator(network.with_adapters(lean_adapters(static, network)), tokenizer, prefix_cache=0)
        answers = AnswerFiles(writer, prompts, work, block=block, max_new_tokens=max_new_tokens)
        stream = OnlineStream(model=network, static=static, learner=learner)
        with progress(len(answers)) as advance, recording(RecordWriter(output)) as record:
            record.write(
                {
                    "kind": "run",
                    "command": "online-exits",
                    "configuration": {
                        "model": model_name(model),
                        "num_layers": network.num_layers,
                        "weights_digest": sha256(json.dumps(fingerprint(network)).encode()).hexdigest()[:12],
                        "prompts_digest": sha256(json.dumps(prompts).encode()).hexdigest()[:12],
                        "exit_layers": list(static.exit_layers),
                        "answers": len(prompts),
                        "max_new_tokens": max_new_tokens,
                        "block": block,
                        "passes": passes,
                        "learning_rate": learning_rate,
                        "rows_mb": rows_mb,
                        "repeats": 1,
                    },
                    "provenance": provenance(torch.device("cpu"), network.dtype),
                }
            )
            done = 0
            for found in answers:
                line = stream.block(found)
                record.write({"kind": "block", "first": done, **line})
                done += line["answers"]
                advance("answers")
    show(record.lines)
