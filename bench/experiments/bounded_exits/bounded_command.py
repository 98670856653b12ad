"""`python -m bench.experiments bounded-exits`: SpecBound's rule beside SPIDE, settings of both chosen on other prompts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from typing import Annotated

import typer

from bench.commands.bench_options import (
    DtypeOption,
    ModelOption,
    NewTokensOption,
    OutputOption,
    PromptsArgument,
    PromptTokensOption,
)
from bench.commands.preparation import progress, recording, show
from bench.datasets import EncodedPrompt
from bench.experiments.bounded_exits.bounded_rounds import Bounds, Played, play
from bench.experiments.bounded_exits.exit_rows import ExitRows
from bench.experiments.settings.arms import OURS, candidates
from bench.experiments.settings.settings_command import count
from bench.experiments.tuned_run import EXIT_LAYERS, ScoredOption, TunedRun, TuningOption
from bench.record import Line, RecordWriter
from layerskip_models.training.evaluation import is_looping
from selfspec.cli.notes import one_line_errors

ALPHAS = (0.0, 0.5, 1.0, 2.0)
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
WIDTHS = (2, 4, 6, 8, 12)
RIVALS = ("SPIDE", "LayerSkip")
PLAIN = "no temperatures"
RULE = "SpecBound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt with the model's own continuation. tokens: of both."""

    tokens: list[int]
    num_prompt_tokens: int
    rows: ExitRows

    def play(self, num_layers: int, bounds: Bounds) -> Played:
        """What decoding it with these bounds takes."""
        return play(self.rows, self.tokens, self.num_prompt_tokens, num_layers, bounds)


def bounded_exits(
    prompts: PromptsArgument,
    model: ModelOption = None,
    exit_layer: Annotated[
        list[int] | None, typer.Option(help="Exit layer to try for SPIDE and LayerSkip; repeatable. Default: 1, 2, 3.")
    ] = None,
    tuning: TuningOption = 3,
    num_samples: ScoredOption = 20,
    prompt_tokens: PromptTokensOption = 320,
    max_new_tokens: NewTokensOption = 96,
    dtype: DtypeOption = "auto",
    output: OutputOption = None,
) -> None:
    """Tokens per loaded layer of SpecBound (a temperature for each exit, drafts that end at a difficult token) and of SPIDE.

    The model continues each prompt greedily; rounds are then played over its text, with drafts that the model makes. Nothing
    is timed, so a busy machine changes nothing. Every prompt is new to a policy.
    """
    with one_line_errors():
        run = TunedRun.prepare(model, dtype, prompts, tuning, num_samples, prompt_tokens, exit_layer or EXIT_LAYERS)
    num_layers = run.generator.model.num_layers
    depths = [depth for depth in (1, 2, 3, 4, 6, 8, 12) if depth < num_layers]

    def text_of(sample: EncodedPrompt) -> Text:
        result = run.generator.generate(
            sample.ids, max_new_tokens=max_new_tokens, policy="ar", do_sample=False, eos_token_id=[]
        )
        text = result.sequences[0].to(run.generator.model.device)
        rows = ExitRows(run.generator.model, text, sample.ids.numel(), max(depths), ALPHAS)
        return Text(tokens=text.tolist(), num_prompt_tokens=sample.ids.numel(), rows=rows)

    grid = [
        Bounds(alpha=alpha, threshold=threshold, depth=depth, width=width)
        for alpha, threshold, depth, width in product(ALPHAS, THRESHOLDS, depths, WIDTHS)
    ]
    with recording(RecordWriter(output)) as record:
        head_layers = run.generator.model.draft_head_bytes / run.generator.model.layer_bytes
        record.write(
            run.description("bounded-exits", max_new_tokens, head_layers=head_layers, settings_tried=len(grid))
        )
        with progress(len(grid)) as advance:
            texts, rates = [text_of(sample) for sample in run.tuning], {}
            for bounds in grid:
                rates[bounds] = _rate([text.play(num_layers, bounds) for text in texts])
                advance(bounds.name)
        chosen = {
            RULE: max(grid, key=rates.__getitem__),
            f"{RULE}, {PLAIN}": max((one for one in grid if not one.alpha), key=rates.__getitem__),
        }
        for rule, bounds in chosen.items():
            record.write({"kind": "tried", "rule": rule, "policy": bounds.name, "etpl": rates[bounds]})
        for sample in run.scored:
            text = text_of(sample)
            looping = is_looping(text.tokens[text.num_prompt_tokens :])
            for rule, bounds in chosen.items():
                line = {"policy": bounds.name, "task": sample.task, "prompt": sample.id}
                counts = asdict(text.play(num_layers, bounds))
                record.write({"kind": "score", "rule": rule, **line, **counts, "looping": looping})
        tried = {rule: candidates(OURS[rule], run.exit_layers) for rule in RIVALS}
        with progress(sum(map(len, tried.values())) + len(tried)) as advance:
            for rule, names in tried.items():
                etpls = {}
                for name in names:
                    lines = [count(run.generator, name, sample, max_new_tokens, 0.0) for sample in run.tuning]
                    etpls[name] = sum(line["tokens"] for line in lines) / sum(line["layers"] for line in lines)
                    record.write({"kind": "tried", "rule": rule, "policy": name, "etpl": etpls[name]})
                    advance(name)
                best = max(names, key=etpls.__getitem__)
                for sample in run.scored:
                    line = count(run.generator, best, sample, max_new_tokens, 0.0)
                    record.write({"kind": "score", "rule": rule, **line, "heads": _heads(line)})
                advance(best)
    show(record.lines)


def _rate(counts: list[Played]) -> float:
    return sum(one.tokens for one in counts) / sum(one.layers for one in counts)


def _heads(line: Line) -> int:
    """At least: one for each drafted token and one for each verification; a row that stopped a draft unseen is left out."""
    return int(line["drafted"] + line["rounds"])
