"""A run's rounds as a picture and as text: threshold, exit layer, length and acceptance, as in DEL's Figure 4."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from policies import Drafter, RoundRecord

_FATES = {(False, True): "+", (False, False): "-", (True, True): "=", (True, False): "x"}
"""What to print for a draft, by whether it was copied and whether it was accepted."""


def plot_trace(records: Sequence[RoundRecord], num_layers: int, policy: str, path: Path) -> None:
    """Draw the rounds into a picture (png, svg, pdf by the path's ending). Raises ValueError for a run without rounds."""
    from matplotlib.figure import Figure  # a good part of a command's start, and few draw
    from matplotlib.ticker import MaxNLocator

    if not records:
        raise ValueError("the run had no round to draw: ask for more tokens")
    figure = Figure(figsize=(9, 8), layout="constrained")
    axes = figure.subplots(4, 1, sharex=True)
    rounds = [record.index for record in records]
    axes[0].step(rounds, [record.exit_layer or 0 for record in records], where="mid", color="tab:blue")
    axes[0].set(ylabel="exit layer\n(0: plain step)", ylim=(-0.5, num_layers + 0.5))
    drafted = [record.num_drafted for record in records]
    axes[1].bar(rounds, drafted, color="lightgrey", label="drafted", width=1.0)
    axes[1].bar(rounds, [record.num_accepted for record in records], color="tab:green", label="accepted", width=1.0)
    if any(record.num_copied for record in records):  # they come before the others
        copied = [min(record.num_accepted, record.num_copied) for record in records]
        axes[1].bar(rounds, copied, color="tab:purple", label="accepted, copied", width=1.0)
    axes[1].set(ylabel="drafts")
    axes[1].legend(loc="upper right")
    thresholds = [(record.index, record.threshold) for record in records if record.threshold is not None]
    if thresholds:
        axes[2].plot(*zip(*thresholds), color="tab:orange", label="threshold")
    for record in records:
        if record.confidences:
            points = [record.index] * len(record.confidences)
            axes[2].scatter(points, record.confidences, s=6, color="tab:grey")
    axes[2].set(ylabel="threshold and\nconfidence of rows", ylim=(-0.02, 1.02))
    estimated = sorted({drafter for r in records for drafter in r.acceptance or ()}, key=lambda one: one.exit_layer)
    for drafter in estimated:
        pairs = [(r.index, r.acceptance[drafter]) for r in records if r.acceptance and drafter in r.acceptance]
        shade = drafter.exit_layer / num_layers
        axes[3].plot(*zip(*pairs), color=(0.2, 0.3 + 0.5 * shade, 0.9 - 0.7 * shade), linewidth=0.9, label=str(drafter))
    real = [(r.index, r.num_accepted / r.num_drafted) for r in records if r.num_drafted]
    if real:
        axes[3].scatter(*zip(*real), s=8, color="black", label="drafts")
    axes[3].set(ylabel="acceptance per drafter\n(points: this round)", xlabel="round", ylim=(-0.02, 1.02))
    if estimated or real:
        handles, labels = axes[3].get_legend_handles_labels()  # of the figure, since it may be higher than its panel
        figure.legend(handles, labels, title="drafter", loc="outside right lower", fontsize="x-small")
    axes[3].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(f"policy {policy}: {len(records)} rounds")
    figure.savefig(path, dpi=120)


def trace_lines(records: Sequence[RoundRecord]) -> list[str]:
    """Write a line per round. A draft is + if accepted, - if not; a copied one = if accepted, x if not."""
    width = max([19, *(record.num_drafted for record in records)])
    lines = [f"round  drafter  {'drafts':{width}}  threshold  estimated acceptance"]
    for record in records:
        places = range(record.num_drafted)
        fate = "".join(_FATES[place < record.num_copied, place < record.num_accepted] for place in places)
        drafter = str(record.drafter or ("copy" if record.num_copied else "plain"))
        threshold = "" if record.threshold is None else f"{record.threshold:.3f}"
        estimate = ""
        if record.acceptance is not None and record.exit_layer is not None:
            # `auto` keeps what an exit drafts in fewer bits as experience with that exit.
            exit_rate = record.acceptance.get(Drafter(record.exit_layer))
            value = record.acceptance.get(Drafter(record.exit_layer, record.bits), exit_rate)
            estimate = "" if value is None else f"{value:.3f}"
        lines.append(f"{record.index:5d}  {drafter:>7}  {fate:<{width}}  {threshold:>9}  {estimate:>9}".rstrip())
    return lines
