"""`python -m bench.experiments answers`: a session of edits, with and without earlier answers to copy from."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer

import policies.finite_state
from bench.commands.bench_options import DtypeOption, ModelOption, OutputOption
from bench.commands.preparation import model_name, open_model, open_tokenizer, progress, recording, show
from bench.experiments.answers.session import PROMPTS, make_edits, replay
from bench.provenance import provenance
from bench.record import RecordWriter
from layerskip_models import DEMO_PATH
from selfspec import SelfSpecGenerator
from selfspec.cli.notes import one_line_errors

_FORCED = "copy:10"


def answers(
    model: ModelOption = None,
    file: Annotated[Path, typer.Option(help="The file that is edited.")] = Path(policies.finite_state.__file__),
    lines: Annotated[int, typer.Option(min=2, help="Lines of the file that are used, the first ones.")] = 20,
    edits: Annotated[int, typer.Option(min=2, help="Edits of the file.")] = 50,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each of the model's own answers.")] = 64,
    policy: Annotated[str, typer.Option(help="Policy for the model's own answers.")] = "auto",
    dtype: DtypeOption = "auto",
    output: OutputOption = None,
) -> None:
    """Replay a session of edits of one file, each request without and with a store of earlier answers, on a CPU.

    The answers are the edited files, which the model is made to say, and then what it says itself to the whole file. Where it
    is made to say them the policy is copy:10, which asks no exit. No prompt's rows are kept from one request to the next.
    """
    with one_line_errors():
        text = "".join(file.read_text(encoding="utf-8").splitlines(keepends=True)[:lines])
        session = make_edits(text, edits)
        checkpoint = str(model or DEMO_PATH)
        generator = SelfSpecGenerator(open_model(checkpoint, dtype, "cpu"), open_tokenizer(checkpoint), prefix_cache=0)
        generator.resolve_policy(policy)
    runs: list[tuple[str, str, int | None]] = [(_FORCED, kind, None) for kind in PROMPTS]
    runs.append((policy, "file", max_new_tokens))
    description: dict[str, Any] = {
        "kind": "run",
        "command": "answers",
        "configuration": {
            "model": model_name(checkpoint),
            "file": f"{lines} lines of {file.name}",
            "edits": edits,
            "max_new_tokens": max_new_tokens,
            "repeats": 1,
            "weights_digest": None,
            "prompts_digest": sha256("".join(edit.text for edit in session).encode()).hexdigest()[:12],
        },
        "provenance": provenance(generator.model.device, generator.model.dtype),
    }
    with recording(RecordWriter(output)) as record:
        record.write(description)
        with progress(2 * edits * len(runs)) as advance:
            for name, kind, most in runs:
                for _ in replay(generator, name, kind, text, session[:2], most):  # warms up
                    pass
                for line in replay(generator, name, kind, text, session, most):
                    record.write(line)
                    advance(f"{name}, {PROMPTS[kind]}")
    show(record.lines)
