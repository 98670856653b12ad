"""Commands and options that earlier versions had. Whoever uses one learns in one line what to use instead."""

from __future__ import annotations

from collections.abc import Sequence

COMMANDS: dict[str, str] = {
    "export-draft": "cut transformers' `model.model.layers` to [:E], set `model.config.num_hidden_layers = E`, and save it",
    "lm-eval": "run `selfspec serve MODEL`, and `lm_eval --model local-completions` against it (docs/serving.md)",
}
"""The remedy, by the name of the command."""
OPTIONS: dict[str, str] = {
    "--quality": "run `selfspec serve MODEL --dtype ..`, and lm_eval against it (docs/transformers.md)",
    "--probe-minutes": "`selfspec train-exit` prints the agreement of each exit with and without its adapter",
    "--server": "`selfspec verify MODEL` checks this engine; ask a server the same alone and in company to check it",
    "--shape": "`accelerate estimate-memory` says how large a model's weights are",
    "--train": "`accelerate estimate-memory` says what a model needs to be trained",
    "--shard": "every process trains a copy of the whole model: leave it out",
    "--tensor-parallel": "more than one GPU: device_map='auto' from Python; more than one machine: replicas of the server",
    "--data-parallel": "split the file of prompts, and decode each part in a process of its own",
    "--arithmetic": "sums are float32, over weights kept in bfloat16 with --dtype bfloat16",
    "--answer-store": "name the texts to copy drafts from with --copy-from FILE",
    "--learn-exits": "train adapters with selfspec train-exit, and load them, or those that it wrote, with --exits",
    "--learn-share": "train adapters with selfspec train-exit, and load them with --exits",
}
"""The remedy, by the option on the command line, dashes included."""
BENCH_COMMANDS = {
    "convert": "`selfspec-bench peers` writes GGUF files itself, and `optimum-cli export openvino` folders",
    "shapes": "run `selfspec-bench run --model synthetic:SHAPE` for each shape",
    "chat": "`selfspec-bench peers --chat` gives chat prompts to all engines, --loads times how they load",
    "serving": "it is called `selfspec-bench load`",
}
"""Those of `selfspec-bench`."""
BENCH_OPTIONS = {
    "--converted": "name the engines with --engine",
    **dict.fromkeys(
        (
            "--int8",
            "--int4",
            "--gguf",
            "--llama-cpp",
            "--ik-llama-cpp",
            "--openvino",
            "--openvino-file",
            "--no-transformers",
        ),
        "name the engines with --engine",
    ),
    "--resume": "leave it out: the same command with the same --output goes on",
    "--into": "`selfspec-bench report --update` fills the tables of documents",
    "--plots": "`selfspec-bench report RECORD -o page.html` draws them",
    "--memory": "`selfspec-bench peers --loads` shows the peak memory of each engine's process",
    "--no-memory": "leave it out: nothing measures memory here",
    "--overhead-tokens": "leave it out; --clients 1 shows what one client gets",
    "--no-prefill": "leave it out: prompts are always read",
    "--joining-tokens": "`selfspec-bench load` measures how long clients wait",
}


def refuse_removed(command: str, arguments: Sequence[str] = (), *, program: str = "selfspec") -> None:
    """Raise ValueError if the command of a program, `selfspec` or `selfspec-bench`, or one of its options existed once."""
    commands, options = (COMMANDS, OPTIONS) if program == "selfspec" else (BENCH_COMMANDS, BENCH_OPTIONS)
    if command in commands:
        raise ValueError(f"`{program} {command}` was removed: {commands[command]}")
    for argument in arguments:
        name = argument.partition("=")[0]
        if name == "--":
            return
        if name in options:
            raise ValueError(f"{name} was removed: {options[name]}")
