"""`python -m bench.experiments leaves`: would second choices of an exit, verified beside its drafts, be worth their rows?"""

from __future__ import annotations

from typing import Annotated

import typer

from bench.commands.bench_options import (
    DtypeOption,
    ModelOption,
    NewTokensOption,
    NumSamplesOption,
    PromptsOption,
    PromptTokensOption,
)
from bench.commands.preparation import encoded, open_model, open_tokenizer, progress
from bench.experiments.copying.gain import borrowed_cost, steady_cost
from bench.experiments.leaves.second_choices import leaf_gain, leaf_rounds
from bench.report.table import Table, print_tables
from layerskip_models import DEMO_PATH
from policies import LayerCost, parse_policy
from selfspec import SelfSpecGenerator
from selfspec.cli.notes import one_line_errors
from selfspec.engine.calibrate import use_cost

BOUNDS = (1.01, 0.9, 0.7, 0.5, 0.3)


def leaves(
    model: ModelOption = None,
    prompts: PromptsOption = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policy whose rounds are replayed; repeatable. Default: auto:copy=off.")
    ] = None,
    costs_of: Annotated[str, typer.Option(help="Shape at whose costs rounds are charged.")] = "synthetic:medium",
    num_samples: NumSamplesOption = 8,
    prompt_tokens: PromptTokensOption = 320,
    max_new_tokens: NewTokensOption = 128,
    dtype: DtypeOption = "auto",
) -> None:
    """Replay what leaves would add: the exit's second choice beside its least confident draft, for the price of a row.

    No engine does this. The command says from recorded rounds what it would gain, at the costs of a shape.
    """
    with one_line_errors():
        checkpoint = str(model or DEMO_PATH)
        names = policy or ["auto:copy=off"]
        samples = encoded(prompts, num_samples, open_tokenizer(checkpoint), prompt_tokens)
        generator = SelfSpecGenerator(open_model(checkpoint, dtype, "cpu"), prefix_cache=0)
        num_layers = generator.model.num_layers
        for name in names:
            if not parse_policy(name, num_layers=num_layers, measure=lambda: LayerCost(num_layers)).observes.confidence:
                raise ValueError(
                    f"{name!r} looks at no confidence, by which leaves would be placed: try auto or spide:E"
                )
        cost = borrowed_cost(steady_cost(open_model(costs_of, dtype, "cpu")), num_layers)
        use_cost(generator.model, cost)
    rows = []
    with progress(len(names) * len(samples)) as advance:
        for name in names:
            rounds = []
            for sample in samples:
                rounds += leaf_rounds(generator, sample, max_new_tokens, name, cost)
                advance(name)
            for bound in BOUNDS:
                found = leaf_gain(rounds, bound, cost)
                limit = "any" if bound > 1 else f"below {bound}"
                rows.append((name, limit, f"{found.leaves:.2f}", f"{found.right:.3f}", f"{100 * found.gain:+.1f} %"))
    columns = ("policy", "confidence", "leaves per round", "right per round", "tokens per cost")
    print_tables(
        [
            Table(
                name="leaves",
                title=f"What leaves would add, at the costs of {costs_of}",
                columns=columns,
                rows=tuple(rows),
            )
        ]
    )
