"""Turning learning on: which adapters it begins with, and what it cannot work with."""

from __future__ import annotations

import copy
from pathlib import Path

from layerskip_models import LayerSkipModel
from layerskip_models.exits.adapter import ExitAdapters
from layerskip_models.exits.folder import CONFIG_FILE, adapters_beside, check_fits, check_unsteered, load_adapters
from layerskip_models.exits.lean import ExitsChoice, lean_adapters
from layerskip_models.output_paths import output_folder
from selfspec.engine.model_source import ModelSource
from selfspec.engine.online_exits import OnlineExits
from selfspec.exits.learning import ExitLearner, LearnSettings


def learn_exits(
    source: ModelSource, folder: Path, start: ExitsChoice = "auto", settings: LearnSettings | None = None
) -> ExitLearner:
    """See `SelfSpecGenerator.learn_exits`."""
    settings = LearnSettings() if settings is None else settings
    model = source.current.model
    if source.follows_module:
        raise ValueError(
            "exits learn for a model that load_model returns: the weights of a transformers model may change"
        )
    if source.current.pool.kind == "captured":
        raise ValueError("exits do not learn from captured rounds: use runner='eager'")
    began, current = _adapters(model, output_folder(folder), start)
    adapters = lean_adapters(current, model)
    learning = model.with_adapters(adapters)
    online = OnlineExits(learning, adapters, num_bytes=settings.num_bytes, rows_per_text=settings.rows_per_text)
    learner = ExitLearner(learning, online, start=began, current=current, folder=folder, settings=settings)
    source.learn_exits(learning, online)
    return learner


def _adapters(model: LayerSkipModel, folder: Path, start: ExitsChoice) -> tuple[ExitAdapters, ExitAdapters]:
    """Those to begin with, and those to draft with: what `folder` holds, if an earlier run has learned."""
    began = adapters_beside(model.name) if start == "auto" else start
    learned = folder if (folder / CONFIG_FILE).is_file() else None
    if began is None and learned is None:
        raise ValueError(
            f"{model.name or 'this model'} has no exit adapters to begin with: train them with selfspec train-exit, and name "
            "their folder with exits (--exits)"
        )
    first = _load(model, Path(began or folder))
    if learned is None:
        return first, copy.deepcopy(first)
    current = _load(model, folder)
    if (current.config.exit_layers, current.config.rank) != (first.config.exit_layers, first.config.rank):
        raise ValueError(f"{folder} holds adapters of other exits or another rank than {began}: choose another folder")
    return first, current


def _load(model: LayerSkipModel, folder: Path) -> ExitAdapters:
    adapters = load_adapters(folder)
    check_fits(adapters.config, model, folder)
    check_unsteered(adapters.config, folder, "learning")
    return adapters
