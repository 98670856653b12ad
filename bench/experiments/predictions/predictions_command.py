"""`python -m bench.experiments predictions`: what follows from the rows of fixed drafts in DEL's table 1."""

from __future__ import annotations

from typing import Any

import torch

from bench.commands.bench_options import OutputOption
from bench.commands.preparation import recording, show
from bench.experiments.predictions.one_rate import (
    best_fixed_length,
    finite_state,
    fitted_rate,
    oracle_length,
)
from bench.experiments.predictions.published import MODELS, TASKS
from bench.provenance import provenance
from bench.record import RecordWriter


def predictions(output: OutputOption = None) -> None:
    """Fit one acceptance rate to each published row of fixed drafts, and compare what it foretells with the other rows.

    No model is run. The table rounds to a thousandth, which is 2 % of its smallest numbers.
    """
    with recording(RecordWriter(output)) as record:
        configuration: dict[str, Any] = {
            "model": "published tables",
            "weights_digest": None,
            "prompts": [],
            "prompts_digest": None,
        }
        record.write(
            {
                "kind": "run",
                "command": "predictions",
                "configuration": {**configuration, "repeats": 1, "do_sample": False},
                "engines": {},
                "provenance": provenance(torch.device("cpu"), torch.float64),
            }
        )
        for model in MODELS:
            shape = model.exit_layer, model.num_layers
            for place, task in enumerate(TASKS):
                rate = fitted_rate(model.fixed[place], model.length, *shape)
                record.write(
                    {
                        "kind": "prediction",
                        "model": model.name,
                        "task": task,
                        "acceptance": rate,
                        "fixed": model.fixed[place],
                        "finite_state": model.finite_state[place],
                        "draft_verify": model.draft_verify[place],
                        "del": model.dynamic[place],
                        "finite_state_foretold": finite_state(rate, *shape),
                        "best_fixed_length": best_fixed_length(rate, *shape),
                        "oracle_length": oracle_length(rate, *shape),
                    }
                )
    show(record.lines)
