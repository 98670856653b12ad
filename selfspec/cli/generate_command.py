"""`selfspec generate`: continue one prompt, or all prompts of a file."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import typer
from rich.console import Console
from transformers import StoppingCriteriaList

from policies import autoregressive, runs_own_code
from selfspec import GenerationResult
from selfspec.analysis.comparison import Generate, compare, warm_up
from selfspec.analysis.explain import explain, explanation_lines
from selfspec.analysis.inspection import arithmetic_in_words
from selfspec.analysis.replay import watching_all_layers
from selfspec.cli import display
from selfspec.cli.arguments import check_sampling, load_generator, store_of_files
from selfspec.cli.batch_file import generate_file, read_prompts
from selfspec.cli.commands import RunOptions
from selfspec.cli.console import Interrupt
from selfspec.cli.option_groups import LoadOptions
from selfspec.cli.text_input import EXAMPLE_PROMPT, EXAMPLE_QUESTION
from selfspec.detokenize import DraftStreamer, TextStreamer, TokenSource
from selfspec.engine.expected_cost import expected_cost
from selfspec.messages import encode_question, has_template
from selfspec.options import WrittenOptions

_WARM_UP_TOKENS = 16


def generate_many(
    options: WrittenOptions, copy_texts: list[str], load: LoadOptions, run: RunOptions, log: Console
) -> None:
    """Decode all prompts of a file. Ends with status 1 if one failed, and 130 after Ctrl-C."""
    assert run.prompts is not None and run.output is not None
    given = {name: value for name, value in options.items() if value is not None}
    lines = read_prompts(run.prompts, run.output, given, copy_texts, raw=run.raw)
    generator = load_generator(run.model, load, log)
    check_sampling(generator.model.generation_config, options)
    try:
        failed = generate_file(generator, lines, run.output, run.batch_size, copy_texts, log)
    except KeyboardInterrupt:
        log.print(f"interrupted: what is complete is in {run.output}; run the same command again to go on")
        raise typer.Exit(130) from None
    if failed:
        log.print(f"{failed} of {len(lines)} prompts failed: their lines in {run.output} say why")
        raise typer.Exit(1)


def generate_one(
    text: str, options: WrittenOptions, copy_texts: list[str], load: LoadOptions, run: RunOptions, log: Console
) -> None:
    """Run one prompt as often as the options need. Ctrl-C ends any run as a stop condition would."""
    # Every run reads the prompt, because runs of one prompt are timed against each other.
    generator = load_generator(run.model, load, log, prefix_cache=0)
    model, tokenizer = generator.model, generator.tokenizer
    assert tokenizer is not None  # a checkpoint is loaded with its tokenizer
    if text is EXAMPLE_PROMPT and not run.raw and has_template(tokenizer):
        text = EXAMPLE_QUESTION
    prompt = encode_question(text, tokenizer, raw=run.raw)
    greedy = check_sampling(model.generation_config, options)
    with log.status("Preparing to draft ..."):
        policy = generator.resolve_policy(options["policy"], options["exit_layer"], options["num_speculations"])
    options["copy_from"] = store_of_files(generator, copy_texts, policy)
    interrupt = Interrupt()
    criteria = StoppingCriteriaList([interrupt])
    generate: Generate = partial(generator.generate, prompt, **options, stopping_criteria=criteria)
    explanation = comparison = None
    with interrupt:
        if run.compare:
            ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            room = model.max_positions - len(ids)
            with log.status("Warming up ..."):
                warm_up(generate, max(1, min(_WARM_UP_TOKENS, room, options["max_new_tokens"] or _WARM_UP_TOKENS)))
        shown, own_code = text if prompt is text else f"{text}\n\n", runs_own_code(str(options["policy"] or ""))
        result = _shown_run(generate, tokenizer, shown, run, log, own_code)
        if run.explain and not interrupt.requested:
            with log.status("Watching every layer ..."):
                cost, num_layers = expected_cost(model, generator.runner), model.num_layers
                changes: dict[str, Any] = {"exit_layer": None, "num_speculations": None, "trace": True}
                watched = generate(**changes, policy=watching_all_layers(policy, num_layers))
                plain = None
                if greedy and (watched.stats.num_copied or model.num_loops > 1):  # nobody watches copying, or waves
                    plain_policy = watching_all_layers(autoregressive(num_layers), num_layers)
                    plain = generate(**changes, policy=plain_policy, copy_from=None)
                explanation = explanation_lines(explain(watched, num_layers, cost, plain, result), cost)
                explanation += [] if policy.reason is None else [f"at the end {policy.reason}"]
        if run.compare and not interrupt.requested:

            def show(index: int) -> None:
                status.update(f"Comparing with plain decoding, run {index + 1} of {2 * run.repeats} ...")

            with log.status("Comparing with plain decoding ...") as status:
                comparison = compare(
                    generate, repeats=run.repeats, greedy=greedy, before_run=show, interrupted=interrupt
                )
    stop_reason = "interrupted" if interrupt.requested else result.stop_reason
    if run.as_json:
        described = {
            "model": model.name,
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
        lines = [*display.summary_lines(result, stop_reason), f"on {arithmetic_in_words(model)}"]
        lines += [] if comparison is None else display.comparison_lines(comparison, result.policy)
        log.print("\n" + "\n".join([*lines, *(explanation or [])]))
    if interrupt.requested:
        raise typer.Exit(130)


def _shown_run(
    generate: Generate, tokenizer: Any, prompt: str, run: RunOptions, log: Console, own_code: bool
) -> GenerationResult:
    """Make the run that the user sees, on standard output and in files. own_code: errors may be of the user's own policy."""
    writer = display.TextWriter(Console(highlight=False))
    drafts: list[tuple[str, TokenSource]] = []

    def on_start() -> None:
        if run.as_json or log.quiet:
            return
        if writer.is_terminal:
            writer.write(prompt, display.PROMPT_STYLE)
        elif run.compare:  # standard output gets the continuation alone
            log.print(f"prompt:\n{prompt}\n", style=display.PROMPT_STYLE)

    def on_token(text: str, source: TokenSource) -> None:
        drafts.append((text, source))
        writer.write_token(text, source)

    if run.show_drafts:
        streamer: TextStreamer = DraftStreamer(tokenizer, on_token, on_start)
        log.print(display.legend(writer.shows_styles))
    else:
        streamer = TextStreamer(tokenizer, (lambda text: None) if run.as_json else writer.write, on_start)
    try:
        result = generate(streamer=streamer, trace=run.trace is not None)
    except (ValueError, TypeError) as error:
        if streamer.started and not own_code:  # the arguments were valid, so this is a bug of ours
            raise RuntimeError("generation failed") from error
        raise
    if not run.as_json:
        writer.write("\n")
    if run.trace is not None:
        display.write_trace(run.trace, result.trace or ())
    if run.svg is not None:
        display.save_drafts(run.svg, f"selfspec generate --policy {result.policy} --show-drafts", prompt, drafts)
    return result
