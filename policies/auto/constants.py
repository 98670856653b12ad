"""The numbers that `auto` was tuned to, in one place; docs/log.md has the measurements."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Each was chosen on recorded texts of several models; most of them matter by a percent or two."""

    # What it learns from, and when it thinks again.
    max_speculations: int = 10
    """A longer draft of a layer that good gains a few percent at most."""
    prompt_rows: int = 8
    """How many of a prompt's last rows teach what every layer would have said."""
    prompt_rows_taught: int = 4
    """The same once earlier calls taught more than `taught`."""
    taught: int = 24
    """Observations per layer."""
    prompt_every: int = 8
    """So many tokens have to come for each row of the prompt: a short text learns from fewer."""
    learn_every: int = 32
    """One row in so many teaches every layer, not its own alone."""
    idle: int = 4
    """Texts in company that know that drafts do not pay learn from one row in so many of those that would teach them."""
    margin_in_batch: float = 0.05
    """By which part drafts must beat plain steps in company: texts that draft end at different times, so the last are less
    in company than they were promised."""
    memory: int = 128
    """Observations per layer that earlier calls count for, at most, when a call begins."""
    news: float = 4.0
    """Values are solved anew at so many times as many rows: a solution costs one or two milliseconds."""
    settled: float = 0.1
    """Relative change of the rate below which another step towards it is not worth its time."""
    passes: int = 5
    """Most such steps at a time."""

    # The acceptance model (`policies.auto.acceptance_model`).
    height: float = 1.0
    """Prior mean of a layer's acceptance above its confidence, in log odds: an exit is right more often than it is sure."""
    slope: float = 1.0
    """Prior mean of the slope of acceptance over confidence, both in log odds."""
    height_spread: float = 1.0
    """Prior: standard deviation of all layers' heights together."""
    step_spread: float = 0.3
    """Prior: standard deviation of the way from a layer to one twice as deep, in a model of 24 layers."""
    own_spread: float = 0.3
    """Prior: standard deviation of a layer from that line."""
    slope_spread: float = 0.3
    """Prior: standard deviation of the slope."""
    fit_count: float = 8.0
    """How many observations the fit is worth in a bin."""
    iterations: int = 3
    """Most steps of Newton's method, each time from where the last fit ended."""
    near: float = 0.01
    """A step shorter than this, in log odds, is the last."""

    # Copied tokens (`policies.auto.copy_values`).
    copy_prior: float = 4.0
    """How many observations the usual acceptance of a match length is worth."""
    copy_memory: float = 64.0
    """Observations of a match length at which the older ones are halved: a text changes from prose to a list."""
    copy_least: float = 0.1
    """Chance of a whole copy below which it grows no longer."""
    copy_usual: float = 0.85
    """Chance of a copied token for which it is reckoned how well an exit tells right from wrong ones."""
    copy_needed: float = 0.3
    """Chance below which a copied token is not worth its row, for the same."""
    wrong_alike: float = 0.2
    """How often a wrong copy and a wrong exit say the same."""
    cut_prior: float = 6.0
    """How many observations what an exit's confidences say of its cuts is worth."""
    cut_usual: float = 0.3
    """Of the wrong copies that it should cut by its confidences, the part that it does cut, until it is known."""
    copy_rounds: float = 32.0
    """Rounds whose tokens and costs tell the rate that a text with copies is decoded at."""

    # Costs repaired by what rounds take (`policies.auto.drift`).
    window: int = 64
    """Rounds that are compared with each other: of one load of the machine, more or less."""
    fewest: int = 8
    """Fewest rounds of each kind; their median counts, so that one in which the thread lost its core is nothing."""
    tolerance: float = 1.3
    """A calibration in quiet is right within a tenth; acting on less would make decisions follow noise."""
    tolerance_in_batch: float = 1.1
    """Costs of many texts are interpolated, and near the number from which on drafts cease to pay a tenth decides."""
    probe_every: int = 4
    """While kinds are compared, one round in so many is of a kind that there are too few of."""
    compare_every: int = 1024
    """Rounds from one comparison to the next."""
    compare_every_in_batch: int = 256
    """The same for many texts: their tokens come from fewer rounds."""


TUNING = Tuning()
