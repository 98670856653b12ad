"""`selfspec lm-eval`: the command of lm-evaluation-harness, with `--model selfspec` registered."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import typer

from selfspec.cli.notes import one_line_errors


def lm_eval_command(context: typer.Context) -> None:
    """Run lm-evaluation-harness with --model selfspec.

    All arguments are the harness's: selfspec lm-eval --model selfspec --model_args pretrained=MODEL,policy=auto --tasks gsm8k
    """
    with one_line_errors():
        if find_spec("lm_eval") is None:
            raise ValueError("lm-evaluation-harness is not installed: pip install 'selfspec[eval]'")
    from lm_eval.__main__ import cli_evaluate

    import selfspec.integrations.lm_eval_model  # noqa: F401, registers the model

    before = sys.argv
    sys.argv = ["lm-eval", *context.args]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
