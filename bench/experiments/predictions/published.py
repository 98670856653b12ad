"""Tokens per loaded layer as DEL's paper measured them (Entezari Zarch et al. 2025, table 1)."""

from __future__ import annotations

from dataclasses import dataclass

TASKS = ("AQuA-RAT", "CNN/DM, continued", "CNN/DM, summarised", "XSUM")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """One model's rows. exit_layer, length: of LS and FS (which begins with this length); DV and FS have the same exit.

    Each row has tokens per loaded layer by task, in the order of `TASKS`, rounded to a thousandth.
    """

    name: str
    num_layers: int
    exit_layer: int
    length: int
    fixed: tuple[float, ...]
    finite_state: tuple[float, ...]
    draft_verify: tuple[float, ...]
    dynamic: tuple[float, ...]


MODELS = (
    PublishedModel(
        name="LLaMA-3.2-1B", num_layers=16, exit_layer=3, length=6,
        fixed=(0.146, 0.154, 0.144, 0.139), finite_state=(0.158, 0.184, 0.159, 0.159),
        draft_verify=(0.122, 0.138, 0.132, 0.099), dynamic=(0.170, 0.198, 0.173, 0.183),
    ),
    PublishedModel(
        name="LLaMA-3-8B", num_layers=32, exit_layer=3, length=6,
        fixed=(0.084, 0.087, 0.089, 0.077), finite_state=(0.094, 0.102, 0.087, 0.080),
        draft_verify=(0.052, 0.052, 0.085, 0.051), dynamic=(0.098, 0.109, 0.105, 0.092),
    ),
    PublishedModel(
        name="LLaMA-2-7B", num_layers=32, exit_layer=7, length=6,
        fixed=(0.064, 0.064, 0.074, 0.070), finite_state=(0.074, 0.073, 0.080, 0.074),
        draft_verify=(0.048, 0.049, 0.088, 0.075), dynamic=(0.087, 0.083, 0.097, 0.084),
    ),
    PublishedModel(
        name="LLaMA-2-13B", num_layers=40, exit_layer=7, length=4,
        fixed=(0.053, 0.049, 0.048, 0.050), finite_state=(0.062, 0.054, 0.049, 0.051),
        draft_verify=(0.040, 0.038, 0.038, 0.038), dynamic=(0.063, 0.056, 0.067, 0.054),
    ),
    PublishedModel(
        name="LLaMA-2-70B", num_layers=80, exit_layer=9, length=6,
        fixed=(0.033, 0.026, 0.028, 0.026), finite_state=(0.036, 0.027, 0.029, 0.026),
        draft_verify=(0.021, 0.019, 0.020, 0.019), dynamic=(0.038, 0.028, 0.035, 0.028),
    ),
)  # fmt: skip
