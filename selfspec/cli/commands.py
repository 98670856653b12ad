"""The commands of `selfspec`: their options, and checks without PyTorch. What is heavy is imported when one runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from layerskip_models.checkpoints.named_models import DEMO, NAMED_MODELS
from layerskip_models.option_fields import parameters_of
from layerskip_models.training.training_config import TrainingConfig
from selfspec.cli import option_groups as shared
from selfspec.cli.console import LogConsole, one_line_errors
from selfspec.cli.option_groups import LoadOptions, checked_output_file, option, with_groups, with_parameters
from selfspec.cli.text_input import CODE_PROMPT, EXAMPLE_PROMPT, PromptArgument, read_copy_files, read_prompt
from selfspec.defaults import DEFAULT_BATCH_SIZE, DEFAULT_POLICY
from selfspec.exits.settings import ExitTraining
from selfspec.options import POLICY_HELP, SamplingOptions, WrittenOptions
from selfspec.pacer.settings import PreVerifierTraining
from selfspec.serve.serve_options import ServeOptions

_MANY, _OUTPUT, _TEXT, _CONVERSATION = "Many prompts", "Output", "Text", "Conversation"
_PROMPTS_HELP = 'JSON lines with "prompt" or "messages", and perhaps options of their own ("seed", ...).'
_RESULTS_HELP = "With --prompts: write the results here as JSON lines. The command resumes an earlier run."


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    model: shared.ModelOption = DEMO
    copy_from: shared.CopyFromOption = None
    compare: bool = option(False, "Also decode without speculation and show the speed-up.", _OUTPUT, "--compare")
    show_drafts: bool = option(False, "Colour each token by how it was produced.", _OUTPUT, "--show-drafts")
    svg: Path | None = option(None, "Draw the coloured text into this file.", _OUTPUT, callback=checked_output_file)
    as_json: bool = option(False, "Print one JSON object instead of the text.", _OUTPUT, "--json")
    trace: Path | None = option(None, "Write a JSON line per round here.", _OUTPUT, callback=checked_output_file)
    explain: bool = option(False, "Explain where time went, and what fixed settings would give.", _OUTPUT, "--explain")
    prompts: Path | None = option(None, _PROMPTS_HELP, _MANY)
    output: Path | None = option(None, _RESULTS_HELP, _MANY, "--output", "-o", callback=checked_output_file)
    batch_size: int = option(DEFAULT_BATCH_SIZE, "With --prompts: number of texts decoded together.", _MANY, min=1)
    file: Path | None = option(None, "Read the prompt from this UTF-8 file.", _TEXT)
    raw: shared.RawOption = False
    ignore_eos: bool = option(False, "Do not stop at an end-of-sequence token.", _TEXT, "--ignore-eos")
    repeats: int = option(3, "Number of pairs of runs for --compare.", _OUTPUT, min=1)
    quiet: bool = option(False, "Text or JSON only: no progress, no summary.", _OUTPUT, "--quiet", "-q")


@with_groups
def generate_command(
    options: WrittenOptions, load: LoadOptions, run: RunOptions, prompt: PromptArgument = None
) -> None:
    """Continue or answer a prompt: print the text as it is generated, then a summary of what speculation did."""
    log = LogConsole(quiet=run.quiet)
    if run.as_json and run.show_drafts:
        raise ValueError("--json prints no text to colour: leave out --show-drafts")
    if run.svg is not None and not run.show_drafts:
        raise ValueError("--svg draws coloured drafts: add --show-drafts")
    if run.ignore_eos and options["eos_token_id"]:
        raise ValueError("give --ignore-eos or --eos-token-id, not both")
    if (run.prompts is None) != (run.output is None):
        raise ValueError("--prompts and --output go together: a file of prompts, and one for the results")
    one_text = (prompt, run.file, run.compare, run.show_drafts, run.svg, run.as_json, run.trace, run.explain)
    if run.prompts is not None and any(one_text):
        raise ValueError("--prompts takes no single prompt, and --compare, --json and the like are for one text")
    if run.ignore_eos:
        options["eos_token_id"] = []
    copy_texts = read_copy_files(run.copy_from)
    text = None if run.prompts is not None else read_prompt(prompt, run.file)
    with log.starting():
        from selfspec.cli.generate_command import generate_many, generate_one
    if text is None:
        generate_many(options, copy_texts, load, run, log)
    else:
        generate_one(text, options, copy_texts, load, run, log)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    model: shared.ModelArgument = DEMO
    policy: shared.PolicyOption = None
    copy_from: shared.CopyFromOption = None
    chat_template: shared.ChatTemplateOption = None
    system: str | None = option(None, "System message.", _CONVERSATION)
    load: Path | None = option(None, "Continue a conversation written by /save.", _CONVERSATION)
    max_new_tokens: int = option(1024, "Maximum number of tokens of an answer.", _CONVERSATION, min=1)
    show_drafts: bool = option(False, "Colour each token by how it was produced.", None, "--show-drafts")


@with_groups
def chat_command(sampling: SamplingOptions, load: LoadOptions, chat: ChatOptions) -> None:
    """Talk to a model. /help lists the commands; Ctrl-C stops an answer and keeps the conversation."""
    log = LogConsole()
    copy_texts = read_copy_files(chat.copy_from)
    with log.starting():
        from selfspec.cli.chat_command import run_chat
    run_chat(sampling, copy_texts, load, chat, log)


_DEMO_HELP = f"{shared.MODEL_HELP} Default: smollm2 if `selfspec get` has downloaded it."


@with_groups
def demo_command(
    load: LoadOptions,
    model: Annotated[str | None, typer.Argument(help=_DEMO_HELP, callback=shared.checked_model)] = None,
    repeats: Annotated[int, typer.Option(help="Number of pairs of runs to measure.", min=1)] = 5,
) -> None:
    """See what it does: three tasks with drafts coloured, and their speed with speculation and without."""
    log = LogConsole()
    with one_line_errors("interrupted: --repeats 1 takes less time"):
        with log.starting():
            from selfspec.cli.demo_command import run_demo
        run_demo(model or ("smollm2" if NAMED_MODELS["smollm2"].find() else DEMO), load, repeats, log)


_NAMES = "; ".join(f"{name}: {model.about}, {model.megabytes} MB" for name, model in NAMED_MODELS.items())


def get_command(name: Annotated[str, typer.Argument(help=f"{_NAMES}.")]) -> None:
    """Download a model that can then be used by its short name, for example: selfspec chat smollm2."""
    with one_line_errors():
        if name not in NAMED_MODELS:
            raise ValueError(f"no model is called {name!r}: the names are {', '.join(NAMED_MODELS)}")
        typer.echo(shared.downloaded(name))


_ENDINGS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    policy: shared.PolicyOption = None
    model: shared.ModelOption = DEMO
    output: Path | None = option(
        None, "Picture to draw (.png, .svg, .pdf).", None, "--output", "-o", callback=checked_output_file
    )
    file: Path | None = option(None, "Read the prompt from this UTF-8 file.")
    raw: shared.RawOption = False
    max_new_tokens: int = option(128, "Maximum number of new tokens. EOS ends only answers to messages.", min=2)


@with_groups
def trace_command(load: LoadOptions, trace: TraceOptions, prompt: PromptArgument = None) -> None:
    """Decode greedily and show every round: exit layer, drafts and their fate, threshold, estimated acceptance."""
    log, output = LogConsole(), trace.output
    if output is not None and output.suffix not in _ENDINGS:
        raise ValueError(f"--output must end with one of {', '.join(_ENDINGS)}, got {output.name!r}")
    if output is not None and find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install matplotlib")
    text = read_prompt(prompt, trace.file)
    with log.starting():
        from selfspec.cli.analysis_commands import show_trace
    show_trace(text, load, trace, log)


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    model: shared.ModelArgument = DEMO
    text: list[Path] | None = option(None, "UTF-8 file with a message or prompt; repeatable (default: two questions).")
    max_new_tokens: int = option(64, "New tokens per text.", min=2)
    repeats: int = option(2, "Number of pairs of runs on each text.", min=1)


@with_groups
def inspect_command(load: LoadOptions, inspect: InspectOptions) -> None:
    """Say what the default policy gains on this model, and where its drafts come from."""
    log = LogConsole()
    texts = [read_prompt(None, path) for path in inspect.text or ()]
    with log.starting():
        from selfspec.cli.analysis_commands import show_inspection
    show_inspection(texts, load, inspect, log)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    model: shared.ModelArgument = DEMO
    file: list[Path] | None = option(None, "UTF-8 file with a plain prompt; repeatable (default: two examples).")
    policy: list[str] | None = option(None, "Policy to verify; repeatable (default: one of each).")
    max_new_tokens: int = option(48, "New tokens per greedy text.", min=4)
    draws: int = option(400, "Number of samples to compare with exact probabilities; 0 for none.", min=0)


@with_groups
def verify_command(load: shared.DeviceOptions, verify: VerifyOptions) -> None:
    """Check on this machine that the engine's output equals that of the model as transformers runs it.

    Ends with status 1 if anything fails.
    """
    log = LogConsole()
    texts = [read_prompt(None, path) for path in verify.file or ()] or [EXAMPLE_PROMPT, CODE_PROMPT]
    with log.starting():
        from selfspec.cli.analysis_commands import show_checks
    show_checks(texts, load, verify, log)


@with_groups
def serve_command(load: LoadOptions, serve: ServeOptions) -> None:
    """Serve a model to OpenAI clients: chat, completions, streams, metrics."""
    log = LogConsole()
    serve.check()
    with log.starting():
        from selfspec.cli.serve_command import run_server
    run_server(load, serve, log)


def export_hub_command(
    model: Annotated[str, typer.Argument(help="Hub name or folder of a checkpoint.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write: a new one, or an empty one.")],
    policy: Annotated[str, typer.Option(help=f"Policy for calls that name none. {POLICY_HELP}")] = DEFAULT_POLICY,
    link: Annotated[bool, typer.Option("--link", help="Link to the weights instead of copying them.")] = False,
) -> None:
    """Write a folder that transformers decodes from with selfspec: from_pretrained, pipeline, serve."""
    log = LogConsole()
    with one_line_errors():
        with log.starting():
            from selfspec.integrations.hub_folder import export_hub
        written = export_hub(model, folder, policy=policy, link=link)
    log.print(f"wrote {written}, for AutoModelForCausalLM.from_pretrained({str(written)!r}, trust_remote_code=True)")


def _training(about: str, settings: type[Any], place: str, next_step: str) -> Callable[..., None]:
    """Make a command with an option for every setting. place: of the function that trains. next_step: {} is its folder."""
    module, _, function = place.partition(":")

    def command(**values: Any) -> None:
        log = LogConsole()
        with one_line_errors("interrupted: repeat the same command to go on from the newest checkpoint"):
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
            checked = settings(**values)
            with log.starting():
                train = getattr(import_module(module), function)
            folder = train(checked)
        if os.environ.get("RANK", "0") == "0":  # one message for all processes of a launcher
            log.print(f"saved to {folder}; use it with: {next_step.format(folder)}")

    return with_parameters(command, parameters_of(settings), about)


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo_command,
    "generate": generate_command,
    "chat": chat_command,
    "get": get_command,
    "trace": trace_command,
    "inspect": inspect_command,
    "verify": verify_command,
    "serve": serve_command,
    "train": _training(
        "Train a Llama with the LayerSkip recipe: layer dropout and early-exit loss.",
        TrainingConfig,
        "layerskip_models.training.layerskip:train",
        'selfspec generate "Once" --model {}',
    ),
    "train-pacer": _training(
        "Train Pacer's pre-verifier for a LayerSkip checkpoint.",
        PreVerifierTraining,
        "selfspec.pacer.training:train_preverifier",
        "selfspec generate --policy pacer:{}",
    ),
    "train-exit": _training(
        "Train exit adapters for a frozen checkpoint: its drafts get better, and its output stays the same.",
        ExitTraining,
        "selfspec.exits.training:train_exit",
        "selfspec generate --model MODEL --exits {}",
    ),
    "export-hub": export_hub_command,
}
"""The commands by name, in the order of the list."""
