"""The numbers that `auto` was tuned to, and what each came from. Dates and machines are those of docs/log.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Most of them matter by a percent or two. "By replay": on the demo's recorded texts, 24, Z4."""

    # What it learns from, and when it solves its equations again.
    max_speculations: int = 10
    """Longest draft. A longer one of a layer that is this good gains a few percent at most."""
    prompt_rows: int = 8
    """Last rows of a prompt that teach what every layer would have said (22, Z3: 12 and 4 are worse)."""
    prompt_rows_taught: int = 4
    """The same once earlier calls taught more than `enough_observations` (22, Z3). By replay 8 decides no better."""
    enough_observations: int = 24
    """Observations per layer from which on prompts teach with fewer rows and texts may be idle. Chosen, not measured."""
    prompt_every: int = 8
    """New tokens that must be to come for each row of the prompt: a short text learns from fewer (22, Z5: time)."""
    learn_every: int = 32
    """One row in this many teaches every layer, and not only its own (22, I: counted in rows, not in rounds)."""
    idle_learning_divisor: int = 4
    """Texts that know that drafts do not pay learn this many times less often (23, Z3: four texts; 24: one text)."""
    margin_in_batch: float = 0.05
    """How much better than plain steps drafts must be in a batch (23, Z3): its texts end at different times, so the last are
    in a smaller batch than they were promised."""
    memory: int = 128
    """Observations per layer that earlier calls count for, at most, when a call begins (22, Z5: 64 to 512 are within 1 %)."""
    resolve_growth: float = 4.0
    """Values are solved again at this many times as many rows; a solution takes one or two milliseconds (22, Z3)."""
    surprise: float = 3.0
    """They are also solved again when drafts at one place were accepted this many standard deviations more or less often than
    supposed. Chosen: rarely by chance, and soon where what is usual does not hold."""
    surprise_floor: float = 0.1
    """Variance that is added before that: of nearly sure drafts one rejection says little, and two say much. Chosen."""
    rate_tolerance: float = 0.1
    """Relative change of the rate below which another of Dinkelbach's steps is not worth its time (22, Z5)."""
    usual_length: int = 4
    """Drafts for which an exit's price in full and in fewer bits is compared. Chosen to be near what is drafted."""
    min_low_bit_drafts: int = 8
    """Drafts in fewer bits that must have been seen before one is longer than `usual_length`. Chosen: a model that they do
    not suit loses two rounds or three."""
    promised_gain: float = 0.1
    """By how much drafts in bits that nobody has tried must promise to beat the best exit and plain steps, before the weights
    are made that they need. Chosen: it is memory for as long as the process lives."""
    min_observations_for_offer: int = 8
    """Observations per layer before that: a prompt's rows. Chosen to be those of one prompt."""
    max_rate_steps: int = 5
    """Most such steps at a time. By replay 2 and 99 decide as well: this only keeps the loop finite."""

    # The acceptance model (`policies.auto.acceptance_model`). Twice or half as much changes 1.3 % at most (by replay).
    height: float = 1.0
    """Prior mean of a layer's acceptance above its confidence, in log odds: an exit is right more often than it is sure."""
    rounded_heights: Mapping[int, float] = field(default_factory=lambda: {8: 4.5, 4: 2.0})
    """The same for drafts through all layers in 8 and 4 bits, measured on 16 free answers of SmolLM2 (24, Z5)."""
    rounded_spread: float = 1.5
    """Prior standard deviation of these. Chosen: models differ more in what rounding does to them than exits do."""
    rounded_confidences: tuple[float, ...] = (
        0.05, 0.13, 0.14, 0.12, 0.11, 0.09, 0.08, 0.07, 0.06, 0.02,
        0.02, 0.02, 0.02, 0.02, 0.02, 0.01, 0.01, 0.01, 0.0, 0.0,
    )  # fmt: skip
    """How often such drafts have a confidence of each bin of `policies.spide`, until some were seen. From the same
    answers: larger models are surer, so this promises too little rather than too much."""
    slope: float = 1.0
    """Prior mean of the slope of acceptance over confidence, both in log odds: confidence is calibrated. Exits have one, and
    drafts in fewer bits another: where exits are never right theirs is flat, and the others' is not (24, Z5)."""
    height_spread: float = 1.0
    """Prior standard deviation of all layers' heights together."""
    spread: float = 0.3
    """Prior standard deviation of the slope, of a layer's height from its neighbours' line, and of the way from a layer to
    one twice as deep (in a model of 24 layers)."""
    fit_count: float = 8.0
    """Observations that the fit is worth in a bin. By replay 2 is 1.5 % worse, 32 no better."""

    # Copied tokens (`policies.auto.copy_values`).
    copy_prior: float = 4.0
    """Observations that the usual acceptance of a match length is worth (23, Z3: 2 and 8 are within 1 %)."""
    copy_memory: float = 64.0
    """Observations of a match length at which the older ones are halved, because a text may turn from prose to a list. By
    replay, all of them are no worse; only this follows a change."""

    # Costs repaired by what rounds take (`policies.auto.drift`).
    window: int = 64
    """Rounds that are compared with each other: of one load of the machine, more or less. Chosen, not measured."""
    fewest: int = 8
    """Fewest rounds of each kind. Their median counts, so one round in which the thread lost its core does not matter."""
    tolerance: float = 1.3
    """A calibration on a quiet machine is right within a tenth. Acting on less would make decisions follow noise."""
    tolerance_in_batch: float = 1.1
    """Costs of many texts are interpolated. Near the batch size at which drafts cease to pay, a tenth decides (23, Z3)."""
    probe_every: int = 4
    """While kinds are compared, one round in this many is of a kind that there are too few of."""
    compare_every: int = 1024
    """Rounds from one comparison to the next, each of which may take `fewest` rounds of a kind that does not pay."""
    compare_every_in_batch: int = 256
    """The same for many texts, whose tokens come from fewer rounds (23, Z3)."""


TUNING = Tuning()
