"""`selfspec generate`: continue one prompt, or all prompts of a file."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from transformers import StoppingCriteriaList

from layerskip_models.output_paths import output_file
from selfspec import GenerationResult, SelfSpecGenerator
from selfspec.analysis.comparison import Comparison, compare, warm_up
from selfspec.analysis.explain import explain, explanation_lines, watching_all_layers
from selfspec.analysis.replay import plain_and_watched
from selfspec.batch import DEFAULT_BATCH_SIZE
from selfspec.cli.arguments import check_sampling, checked_output_file, load_generator
from selfspec.cli.batch_file import generate_file, read_prompts, store_for_lines
from selfspec.cli.display import (
    PROMPT_STYLE,
    TextWriter,
    comparison_lines,
    legend,
    save_drafts,
    summary_lines,
    write_trace,
)
from selfspec.cli.interrupt import InterruptCriteria
from selfspec.cli.notes import notes_console, one_line_errors
from selfspec.cli.option_groups import CopyFromOption, LoadOptions, ModelOption, option, with_groups
from selfspec.cli.text_input import PromptArgument, read_copy_files, read_prompt, store_of_files
from selfspec.engine.calibrate import measured_cost
from selfspec.options import WrittenOptions
from selfspec.streaming import DraftStreamer, Fate, TextStreamer

_WARM_UP_TOKENS = 16
_MANY, _OUTPUT, _TEXT = "Many prompts", "Output", "Text"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    prompts: Path | None = option(
        None,
        'Many prompts: JSON lines with "prompt" or "messages", and optionally options of their own ("seed", ...).',
        _MANY,
    )
    output: Path | None = option(
        None,
        "With --prompts: write the results here as JSON lines. The command resumes an earlier run.",
        _MANY,
        *("--output", "-o"),
        callback=checked_output_file,
    )
    batch_size: int = option(DEFAULT_BATCH_SIZE, "With --prompts: number of texts decoded together.", _MANY, min=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    compare: bool = option(False, "Also decode without speculation and show the speed-up.", _OUTPUT, "--compare")
    show_drafts: bool = option(
        False, "Colour each token by how it was produced (accepted draft, correction, ...).", _OUTPUT, "--show-drafts"
    )
    svg: Path | None = option(
        None,
        "With --show-drafts: also draw the coloured text into this SVG file.",
        _OUTPUT,
        callback=checked_output_file,
    )
    as_json: bool = option(False, "Print one JSON object instead of the text.", _OUTPUT, "--json")
    trace: Path | None = option(
        None, "Write a JSON line per round to this file.", _OUTPUT, callback=checked_output_file
    )
    explain: bool = option(
        False,
        "Explain where the time went, what limits the speed-up, and what fixed settings would have given.",
        _OUTPUT,
        "--explain",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    file: Path | None = option(None, "Read the prompt from this UTF-8 file.", _TEXT)
    ignore_eos: bool = option(False, "Do not stop at an end-of-sequence token.", _TEXT, "--ignore-eos")
    repeats: int = option(3, "Number of pairs of runs for --compare.", _OUTPUT, min=1)
    quiet: bool = option(False, "Text or JSON only: no progress, no summary.", _OUTPUT, "--quiet", "-q")


@with_groups
def generate_command(
    options: WrittenOptions,
    load: LoadOptions,
    shown: OutputOptions,
    many: FileOptions,
    run: RunOptions,
    prompt: PromptArgument = None,
    model: ModelOption = None,
    copy_from: CopyFromOption = None,
) -> None:
    """Continue a prompt: print the text as it is generated, then a summary of what speculation did."""
    notes = notes_console(run.quiet)
    with one_line_errors():
        if shown.as_json and shown.show_drafts:
            raise ValueError("--json prints no text to colour: leave out --show-drafts")
        if shown.svg is not None and not shown.show_drafts:
            raise ValueError("--svg draws coloured drafts: add --show-drafts")
        if run.ignore_eos and options["eos_token_id"]:
            raise ValueError("give --ignore-eos or --eos-token-id, not both")
        if (many.prompts is None) != (many.output is None):
            raise ValueError("--prompts and --output go together: a file of prompts, and one for the results")
        if many.prompts is not None and any((prompt, run.file, *astuple(shown))):
            raise ValueError("--prompts takes no single prompt, and --compare, --json and the like are for one text")
        if run.ignore_eos:
            options["eos_token_id"] = []
        copy_texts = read_copy_files(copy_from)
        if many.prompts is not None:
            _generate_many(many, options, copy_texts, model, load, notes)
        else:
            text = read_prompt(prompt, run.file)
            # Every run reads the prompt, because runs of one prompt are timed against each other.
            generator = load_generator(model, load, notes, prefix_cache=0)
            greedy = check_sampling(generator.model.generation_config, options)
            session = _Session(generator, text, options, copy_texts, notes)
            _generate_one(session, shown, run.repeats, greedy)


def _generate_many(
    many: FileOptions,
    options: WrittenOptions,
    copy_texts: list[str],
    model: str | None,
    load: LoadOptions,
    notes: Console,
) -> None:
    assert many.prompts is not None and many.output is not None
    output_file(many.output, replaced=True)
    asked = read_prompts(
        many.prompts, {name: value for name, value in options.items() if value is not None}, copy_texts
    )
    generator = load_generator(model, load, notes)
    check_sampling(generator.model.generation_config, options)
    store = store_for_lines(generator, asked, copy_texts)
    try:
        failed = generate_file(generator, asked, many.output, batch_size=many.batch_size, notes=notes, store=store)
    except KeyboardInterrupt:
        notes.print(f"interrupted: what is complete is in {many.output}; run the same command again to go on")
        raise typer.Exit(130) from None
    if failed:
        notes.print(f"{failed} of {len(asked)} prompts failed: their lines in {many.output} say why")
        raise typer.Exit(1)


def _generate_one(session: _Session, shown: OutputOptions, repeats: int, greedy: bool) -> None:
    explanation = comparison = None
    with session.interrupt:
        if shown.compare:
            session.warm_up()
        result = session.run(shown)
        if shown.svg is not None:
            save_drafts(
                shown.svg, f"selfspec generate --policy {result.policy} --show-drafts", session.prompt, session.drafts
            )
        if shown.explain and not session.interrupt.requested:
            explanation = session.explain(greedy)
        if shown.compare:
            comparison = session.compare(repeats, greedy)
    interrupted = session.interrupt.requested
    stop_reason = "interrupted" if interrupted else result.stop_reason
    if shown.as_json:
        described = {
            "model": session.generator.model.name,
            "text": result.text,
            "token_ids": result.new_tokens,
            "num_prompt_tokens": result.stats.num_prompt_tokens,
            "stop_reason": stop_reason,
            "policy": result.policy,
            "stats": result.stats.as_dict(),
            "comparison": None if comparison is None else comparison.as_dict(),
            "explanation": explanation,
        }
        typer.echo(json.dumps(described, allow_nan=False))
    else:
        lines = summary_lines(result, stop_reason)
        lines += [] if comparison is None else comparison_lines(comparison, result.policy)
        session.notes.print("\n" + "\n".join([*lines, *(explanation or [])]))
    if interrupted:
        raise typer.Exit(130)


class _Session:
    """One prompt and its options, run as often as the command needs. Ctrl-C ends any run as a stop condition would."""

    def __init__(
        self, generator: SelfSpecGenerator, prompt: str, options: WrittenOptions, copy_texts: list[str], notes: Console
    ) -> None:
        assert generator.tokenizer is not None  # a checkpoint is loaded with its tokenizer
        self.interrupt = InterruptCriteria()
        self.generator, self.prompt, self.notes = generator, prompt, notes
        self.drafts: list[tuple[str, Fate]] = []  # what `run` wrote with --show-drafts
        self._tokenizer, self._max_new_tokens = generator.tokenizer, options["max_new_tokens"]
        with notes.status("Calibrating ..."):  # only if the policy uses measured costs
            self._policy = generator.resolve_policy(
                options["policy"], options["exit_layer"], options["num_speculations"]
            )
        options["copy_from"] = store_of_files(generator, copy_texts, self._policy)
        self._generate = partial(
            generator.generate, prompt, **options, stopping_criteria=StoppingCriteriaList([self.interrupt])
        )

    def warm_up(self) -> None:
        room = self.generator.model.max_positions - len(self._tokenizer(self.prompt)["input_ids"])
        tokens = min(_WARM_UP_TOKENS, room, self._max_new_tokens or _WARM_UP_TOKENS)
        with self.notes.status("Warming up ..."):
            warm_up(self._generate, max(1, tokens))

    def run(self, shown: OutputOptions) -> GenerationResult:
        """Make the run that the user sees, on standard output unless JSON is asked for."""
        writer = TextWriter(Console(highlight=False))

        def on_start() -> None:
            if shown.as_json or self.notes.quiet:
                return
            if writer.is_terminal:
                writer.write(self.prompt, PROMPT_STYLE)
            elif shown.compare:  # standard output gets the continuation alone
                self.notes.print(f"prompt:\n{self.prompt}\n", style=PROMPT_STYLE)

        def on_token(text: str, fate: Fate) -> None:
            self.drafts.append((text, fate))
            writer.write_token(text, fate)

        if shown.show_drafts:
            streamer: TextStreamer = DraftStreamer(self._tokenizer, on_token, on_start)
            self.notes.print(legend(writer.shows_styles))
        else:
            streamer = TextStreamer(self._tokenizer, (lambda text: None) if shown.as_json else writer.write, on_start)
        try:
            result = self._generate(streamer=streamer, trace=shown.trace is not None)
        except (ValueError, TypeError) as error:
            if streamer.started:  # the arguments were valid, so this is a bug of ours
                raise RuntimeError("generation failed") from error
            raise
        if not shown.as_json:
            writer.write("\n")
        if shown.trace is not None:
            write_trace(shown.trace, result.trace or ())
        return result

    def explain(self, greedy: bool) -> list[str]:
        """Run once more with every layer watched, and explain that run."""
        num_layers = self.generator.model.num_layers
        with self.notes.status("Watching every layer ..."):
            cost = measured_cost(self.generator.model)
            changes: dict[str, Any] = {"exit_layer": None, "num_speculations": None, "trace": True}
            result = self._generate(**changes, policy=watching_all_layers(self._policy, num_layers))
            plain = None
            if greedy and result.stats.num_copied:
                plain = self._generate(**changes, policy=plain_and_watched(num_layers), copy_from=None)
            return explanation_lines(explain(result, num_layers, cost, plain), cost)

    def compare(self, repeats: int, greedy: bool) -> Comparison | None:
        """Time both modes in turn; None if Ctrl-C came before the first pair was complete."""
        if self.interrupt.requested:
            return None
        doing = "Comparing with autoregressive decoding"
        with self.notes.status(f"{doing} ...") as status:
            return compare(
                self._generate,
                repeats=repeats,
                greedy=greedy,
                before_run=lambda run: status.update(f"{doing}, run {run + 1} of {2 * repeats} ..."),
                interrupted=lambda: self.interrupt.requested,
            )
