"""The commands `generate`, `chat`, `serve`, `trace`, `inspect`, `verify`, and those that train and export.

Generated text goes to standard output, everything about it to standard error, so that a pipe gets the text alone. A wrong
call ends with status 2 and one line that says what to do, Ctrl-C with 130, and what was generated until then stays.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from transformers import StoppingCriteriaList

from layerskip_models.parallel.ranks import launched_ranks
from layerskip_models.training.loop import train_command
from layerskip_models.training.options import command_for_config
from selfspec import GenerationResult, SelfSpecGenerator, __version__
from selfspec.analysis.comparison import Comparison, compare, warm_up
from selfspec.analysis.explain import explain, explanation_lines, plain_and_watched, watching_all_layers
from selfspec.batch import DEFAULT_BATCH_SIZE
from selfspec.cli.analysis_commands import inspect_command, trace_command, verify_command
from selfspec.cli.arguments import (
    POLICY_HELP,
    DeviceOption,
    DtypeOption,
    ExitsOption,
    KvDtypeOption,
    ModelOption,
    check_sampling,
    checked_output_file,
    load_generator,
    notes_console,
    one_line_errors,
)
from selfspec.cli.batch_file import generate_file, read_prompts, store_for_lines
from selfspec.cli.chat_command import chat_command
from selfspec.cli.copy_files import CopyFromOption, read_copy_files, store_of_files
from selfspec.cli.display import (
    PROMPT_STYLE,
    TextWriter,
    comparison_lines,
    legend,
    save_drafts,
    summary_lines,
    write_trace,
)
from selfspec.cli.draft_command import export_draft_command
from selfspec.cli.hub_command import export_hub_command
from selfspec.cli.interrupt import InterruptCriteria
from selfspec.cli.lm_eval_command import lm_eval_command
from selfspec.cli.prompt_input import read_prompt
from selfspec.cli.serve_command import serve_command
from selfspec.cli.shared_prompts import generate_shared
from selfspec.distributed.launch import TensorParallel, from_first, own_device, speaks
from selfspec.engine.calibrate import measured_cost
from selfspec.exits.settings import ExitTraining
from selfspec.exits.training import train_exit
from selfspec.pacer.settings import PreVerifierTraining
from selfspec.pacer.training import train_preverifier
from selfspec.streaming import DraftStreamer, Fate, TextStreamer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="LayerSkip self-speculative decoding: a model drafts with its first layers and verifies with the rest.",
)
WARM_UP_TOKENS = 16


def main() -> None:
    """Entry of the `selfspec` script."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"selfspec {__version__}")
        raise typer.Exit


@app.callback()
def _selfspec(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """What the program is; its commands do the work."""


_SPECULATION, _TEXT, _OUTPUT, _MANY = "Speculation", "Text", "Output", "Many texts"


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help='Text to continue; "-" reads standard input (default: an example).')
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Read the prompt from this UTF-8 file.", rich_help_panel=_TEXT)
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='Many texts: JSON lines with "prompt" or "messages", and options of their own if you like ("seed", ...).',
            rich_help_panel=_MANY,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="With --prompts: the results as JSON lines. The command goes on where an earlier run stopped.",
            rich_help_panel=_MANY,
            callback=checked_output_file,
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="With --prompts: texts that are decoded together.", rich_help_panel=_MANY)
    ] = DEFAULT_BATCH_SIZE,
    data_parallel: Annotated[
        bool,
        typer.Option(
            "--data-parallel",
            help="With --prompts, under accelerate launch or torchrun: each process holds the whole model and takes a share "
            "of the prompts. Without it the model is divided over torchrun's processes.",
            rich_help_panel=_MANY,
        ),
    ] = False,
    model: ModelOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    exits: ExitsOption = "auto",
    kv_dtype: KvDtypeOption = "auto",
    policy: Annotated[str | None, typer.Option(help=POLICY_HELP, rich_help_panel=_SPECULATION)] = None,
    exit_layer: Annotated[
        int | None, typer.Option(help="Number of layers that draft; instead of --policy.", rich_help_panel=_SPECULATION)
    ] = None,
    num_speculations: Annotated[
        int | None,
        typer.Option(help="Tokens drafted per round; 0 is plain decoding.", rich_help_panel=_SPECULATION),
    ] = None,
    copy_from: CopyFromOption = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of new tokens (default 128).", rich_help_panel=_TEXT)
    ] = None,
    do_sample: Annotated[
        bool | None,
        typer.Option(
            "--do-sample/--no-do-sample",
            help="Draw tokens at random, or always take the likeliest. Default: what the checkpoint says.",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy.", rich_help_panel=_TEXT)
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from the k likeliest tokens only.", rich_help_panel=_TEXT)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the likeliest tokens that together have this probability.", rich_help_panel=_TEXT),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Draw only tokens at least this fraction as likely as the likeliest one.", rich_help_panel=_TEXT
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 discourages repetition.", rich_help_panel=_TEXT)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.", rich_help_panel=_TEXT)] = None,
    eos_token_id: Annotated[
        list[int] | None,
        typer.Option(help="Token id that ends the text; may be given several times.", rich_help_panel=_TEXT),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not stop at an end-of-sequence token.", rich_help_panel=_TEXT)
    ] = False,
    stop_strings: Annotated[
        list[str] | None,
        typer.Option(help="String that ends the text; may be given several times.", rich_help_panel=_TEXT),
    ] = None,
    compare_modes: Annotated[
        bool,
        typer.Option(
            "--compare", help="Also decode without speculation and show the speed-up.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    repeats: Annotated[
        int, typer.Option(min=1, help="Number of pairs of runs for --compare.", rich_help_panel=_OUTPUT)
    ] = 3,
    show_drafts: Annotated[
        bool,
        typer.Option(
            "--show-drafts",
            help="Colour each token by how it came about (accepted draft, correction, ...).",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    svg: Annotated[
        Path | None,
        typer.Option(
            help="With --show-drafts: also draw the coloured text into this SVG file.",
            rich_help_panel=_OUTPUT,
            callback=checked_output_file,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.", rich_help_panel=_OUTPUT)
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write a JSON line per round to this file.", rich_help_panel=_OUTPUT, callback=checked_output_file
        ),
    ] = None,
    explain_run: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Explain where the time went, what limits the speed-up, and what fixed settings would have given.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Text or JSON only: no progress, no summary.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    """Continue a prompt: print the text as it is generated, then a summary of what speculation did."""
    options: dict[str, Any] = {
        "policy": policy,
        "exit_layer": exit_layer,
        "num_speculations": num_speculations,
        "max_new_tokens": max_new_tokens,
        "do_sample": do_sample,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "eos_token_id": [] if ignore_eos else eos_token_id or None,
        "stop_strings": stop_strings or None,
    }
    notes = notes_console(quiet)
    with one_line_errors():
        if as_json and show_drafts:
            raise ValueError("--json prints no text to colour: leave out --show-drafts")
        if svg is not None and not show_drafts:
            raise ValueError("--svg draws coloured drafts: add --show-drafts")
        if ignore_eos and eos_token_id:
            raise ValueError("give --ignore-eos or --eos-token-id, not both")
        if (prompts is None) != (output is None):
            raise ValueError("--prompts and --output go together: a file of prompts, and one for the results")
        if data_parallel and prompts is None:
            raise ValueError("--data-parallel shares out the prompts of a file: add --prompts and --output")
        if prompts is not None and output is not None:
            if any((prompt, file, compare_modes, show_drafts, svg, as_json, trace, explain_run)):
                raise ValueError(
                    "--prompts takes no single prompt, and --compare, --json and the like are for one text"
                )
            copy_texts = read_copy_files(copy_from)
            given = {name: value for name, value in options.items() if value is not None}
            asked = read_prompts(prompts, given, copy_texts)
            divided: TensorParallel = None if data_parallel else "auto"
            own = own_device(device) if data_parallel else device
            generator = load_generator(
                model, dtype, own, notes, exits=exits, kv_dtype=kv_dtype, tensor_parallel=divided
            )
            check_sampling(generator.model.generation_config, options)
            store = store_for_lines(generator, asked, copy_texts)
            decode = generate_shared if data_parallel and launched_ranks() > 1 else generate_file
            run = partial(decode, generator, asked, output, batch_size=batch_size, notes=notes, store=store)
            _generate_file(run, len(asked), output, notes)
            return
        text, copy_texts = read_prompt(prompt, file) if speaks() else "", read_copy_files(copy_from)
        # Runs of one prompt are timed beside each other: each reads it.
        generator = load_generator(
            model, dtype, device, notes, prefix_cache=0, exits=exits, kv_dtype=kv_dtype, tensor_parallel="auto"
        )
        text = from_first(generator.model, lambda: text)
        greedy = check_sampling(generator.model.generation_config, options)
        with notes.status("Calibrating ..."):  # if the policy counts seconds
            chosen = generator.resolve_policy(policy, exit_layer, num_speculations)
        options["copy_from"] = store_of_files(generator, copy_texts, chosen)
        session = _Session(generator, text, options, notes)
        with session.interrupt:
            if compare_modes:
                session.warm_up()
            result = session.run(show_drafts=show_drafts, silent=as_json, trace=trace, show_prompt=compare_modes)
            if svg is not None and speaks():
                save_drafts(svg, f"selfspec generate --policy {result.policy} --show-drafts", text, session.shown)
            explanation = session.explain(greedy) if explain_run and not session.interrupt.requested else None
            comparison = session.compare(repeats, greedy) if compare_modes else None
    stop_reason = "interrupted" if session.interrupt.requested else result.stop_reason
    if as_json:
        described = _as_dict(generator, result, stop_reason, comparison)
        typer.echo(json.dumps({**described, "explanation": explanation}, allow_nan=False))
    else:
        lines = summary_lines(result, stop_reason)
        lines += comparison_lines(comparison, result.policy) if comparison is not None else []
        lines += explanation if explanation is not None else []
        notes.print("\n" + "\n".join(lines))
    if session.interrupt.requested:
        raise typer.Exit(130)


def _generate_file(decode: Callable[[], int], count: int, output: Path, notes: Console) -> None:
    """decode: returns how many of `count` prompts failed."""
    try:
        failed = decode()
    except KeyboardInterrupt:
        notes.print(f"interrupted: what is complete is in {output}; run the same command again to go on")
        raise typer.Exit(130) from None
    if failed:
        notes.print(f"{failed} of {count} prompts failed: their lines in {output} say why")
        raise typer.Exit(1)


class _Session:
    """One prompt and its options, run as often as the command needs it; Ctrl-C ends any run as a stop condition would."""

    def __init__(self, generator: SelfSpecGenerator, prompt: str, options: dict[str, Any], notes: Console) -> None:
        assert generator.tokenizer is not None  # a checkpoint is loaded with its tokenizer
        self.interrupt = InterruptCriteria()
        self.shown: list[tuple[str, Fate]] = []  # what `run` wrote with the fates of tokens
        self._prompt = prompt
        self._notes = notes
        self._model, self._tokenizer = generator.model, generator.tokenizer
        self._generator, self._options = generator, options
        self._max_new_tokens = options["max_new_tokens"]
        self._generate = partial(
            generator.generate, prompt, **options, stopping_criteria=StoppingCriteriaList([self.interrupt])
        )

    def warm_up(self) -> None:
        room = self._model.max_positions - len(self._tokenizer(self._prompt)["input_ids"])
        tokens = min(WARM_UP_TOKENS, room, self._max_new_tokens or WARM_UP_TOKENS)
        with self._notes.status("Warming up ..."):
            warm_up(self._generate, max(1, tokens))

    def run(
        self, *, show_drafts: bool, silent: bool, trace: Path | None, show_prompt: bool = False
    ) -> GenerationResult:
        """The run that the user sees, on standard output unless it is to be silent.

        show_prompt: print the prompt to standard error where standard output is no terminal, which shows it anyway.
        """
        writer = TextWriter(Console(highlight=False))

        def on_start() -> None:
            if silent or self._notes.quiet:
                return
            if writer.is_terminal:
                writer.write(self._prompt, PROMPT_STYLE)
            elif show_prompt:  # standard output gets the continuation alone
                self._notes.print(f"prompt:\n{self._prompt}\n", style=PROMPT_STYLE)

        streamer = TextStreamer(self._tokenizer, _discard if silent else writer.write, on_start)
        if show_drafts:

            def on_token(text: str, fate: Fate) -> None:
                self.shown.append((text, fate))
                writer.write_token(text, fate)

            streamer = DraftStreamer(self._tokenizer, on_token, on_start)
            self._notes.print(legend(writer.shows_styles))
        try:
            result = self._generate(streamer=streamer, trace=trace is not None)
        except (ValueError, TypeError) as error:
            if streamer.started:  # the call was a valid one, so this is our fault and not the caller's
                raise RuntimeError("generation failed") from error
            raise
        if not silent:
            writer.write("\n")
        if trace is not None and speaks():
            write_trace(trace, result.trace or ())
        return result

    def explain(self, greedy: bool) -> list[str]:
        """Run once more with every layer watched, and explain that run."""
        num_layers = self._model.num_layers
        with self._notes.status("Watching every layer ..."):
            cost = measured_cost(self._model, self._generator.runner)
            policy = self._generator.resolve_policy(
                self._options["policy"], self._options["exit_layer"], self._options["num_speculations"]
            )
            watched = watching_all_layers(policy, num_layers)
            changes: dict[str, Any] = {"exit_layer": None, "num_speculations": None, "trace": True}
            result, plain = self._generate(**changes, policy=watched), None
            if greedy and result.stats.num_copied:
                plain = self._generate(**changes, policy=plain_and_watched(num_layers), copy_from=None)
            return explanation_lines(explain(result, num_layers, cost, plain), cost)

    def compare(self, repeats: int, greedy: bool) -> Comparison | None:
        """Time both modes in turn; None if Ctrl-C came before the first pair was complete."""
        if self.interrupt.requested:
            return None
        with self._notes.status("Comparing with autoregressive decoding ...") as status:
            return compare(
                self._generate,
                repeats=repeats,
                greedy=greedy,
                before_run=lambda run: status.update(
                    f"Comparing with autoregressive decoding, run {run + 1} of {2 * repeats} ..."
                ),
                interrupted=lambda: self.interrupt.requested,
            )


app.command("chat")(chat_command)
app.command("trace")(trace_command)
app.command("inspect")(inspect_command)
app.command("verify")(verify_command)
app.command("serve")(serve_command)
app.command("train")(train_command)
app.command("train-pacer")(
    command_for_config(
        train_preverifier,
        PreVerifierTraining,
        "Train Pacer's pre-verifier for a LayerSkip checkpoint.",
        "selfspec generate --policy pacer:{}",
    )
)
app.command("train-exit")(
    command_for_config(
        train_exit,
        ExitTraining,
        "Train exit adapters for a frozen checkpoint: its drafts get better, its output stays what it is.",
        "selfspec generate --model MODEL --exits {}",
    )
)
app.command("export-hub")(export_hub_command)
app.command("export-draft")(export_draft_command)
app.command(
    "lm-eval", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)(lm_eval_command)


def _as_dict(
    generator: SelfSpecGenerator, result: GenerationResult, stop_reason: str, comparison: Comparison | None
) -> dict[str, object]:
    return {
        "model": generator.model.name,
        "text": result.text,
        "token_ids": result.new_tokens,
        "num_prompt_tokens": result.stats.num_prompt_tokens,
        "stop_reason": stop_reason,
        "policy": result.policy,
        "stats": result.stats.as_dict(),
        "comparison": None if comparison is None else comparison.as_dict(),
    }


def _discard(text: str) -> None:
    """Write nothing."""


if __name__ == "__main__":
    main()
