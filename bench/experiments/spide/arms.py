"""The arms of SPIDE's Table 5 at one exit layer, their settings chosen on some texts and scored on others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.experiments.spide.algorithm import Call, drafts_ahead, longest_runs, play
from bench.experiments.spide.free_drafts import DraftedText
from bench.record import Line
from policies import DraftVerifyThreshold, NeverStop, SpideStopping, StoppingPolicy, SvipThreshold

TAUS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Section 4.2 and Appendix D.3: the range that the paper finds good."""
LOW_TAUS = (0.05, 0.1, 0.2, 0.3)
LENGTHS = range(1, 13)
MOST = 32
"""Drafts of a serial draft; the paper has no bound but the text's end."""
MOST_AHEAD = 16
WINDOW = MOST + MOST_AHEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to decode. name: as in Table 5. tau, length: of the rule that ends serial drafts; ahead: s, 0 without parallel
    verification. bins: of SPIDE's table."""

    name: str
    tau: float | None = None
    length: int = MOST
    ahead: int = 0
    bins: str = "paper"

    def stopping(self, exit_layer: int, num_layers: int) -> StoppingPolicy:
        """The rule that ends its serial drafts, having learned nothing."""
        if self.name == "svip":
            return SvipThreshold(max_length=self.length)
        if self.name == "dv":
            return DraftVerifyThreshold(max_length=self.length)
        if self.tau is None:
            return NeverStop()
        return SpideStopping((exit_layer,), num_layers=num_layers, tau=self.tau, max_length=self.length, bins=self.bins)


def run_arm(arm: Arm, texts: Sequence[DraftedText]) -> list[list[Call]]:
    """The calls on each text, in this order: what SPIDE's table has learned lasts from text to text, as in the paper."""
    first = texts[0]
    stopping = arm.stopping(first.exit_layer, first.num_layers)
    return [play(text, stopping, most=arm.length, ahead=arm.ahead) for text in texts]


def outcome(arm: Arm, text: DraftedText, calls: Sequence[Call]) -> Line:
    """A line of the record. Times in layers of the model (`Call`)."""
    runs = longest_runs(calls)
    return {
        "kind": "arm",
        "arm": arm.name,
        "tau": arm.tau,
        "length": arm.length,
        "ahead": arm.ahead,
        "bins": arm.bins if arm.tau is not None else None,
        "exit_layer": text.exit_layer,
        "task": text.task,
        "prompt": text.prompt,
        "tokens": sum(call.tokens for call in calls),
        "calls": len(calls),
        "drafts": sum(call.drafted + call.ahead for call in calls),
        "accepted": sum(call.accepted for call in calls),
        "runs": len(runs),
        "one_device": sum(call.layers(text.exit_layer, text.num_layers) for call in calls),
        "two_devices": sum(call.two_device_time(text.exit_layer, text.num_layers) for call in calls),
    }


def speed(arm: Arm, texts: Sequence[DraftedText]) -> float:
    """Tokens per layer of two devices' time, all texts pooled."""
    lines = [outcome(arm, text, calls) for text, calls in zip(texts, run_arm(arm, texts))]
    return float(sum(line["tokens"] for line in lines) / sum(line["two_devices"] for line in lines))


def choose(texts: Sequence[DraftedText]) -> tuple[Line, list[Arm]]:
    """What is best on these texts, and the arms to score on others.

    Chosen one after the other: the length of vanilla drafts (Table 17), tau with s by eq. 6 and without parallel verification
    (Table 18), s by simulation at that tau, and a tau of any height with our bins of confidence.
    """
    first = texts[0]
    s = min(drafts_ahead(first.exit_layer, first.num_layers), MOST_AHEAD)

    def best(arms: Sequence[Arm]) -> Arm:
        return max(arms, key=lambda arm: speed(arm, texts))

    fixed = best([Arm(name="fixed", length=length) for length in LENGTHS])
    whole = best([Arm(name="spide", tau=tau, ahead=s) for tau in TAUS])
    serial = best([Arm(name="serial", tau=tau) for tau in TAUS])
    simulated = best([replace(whole, ahead=ahead) for ahead in range(1, MOST_AHEAD + 1)])
    ours = best([Arm(name="ours", tau=tau, ahead=simulated.ahead, bins="doubt") for tau in (*LOW_TAUS, *TAUS)])
    ours_serial = best([Arm(name="ours, serial", tau=tau, bins="doubt") for tau in (*LOW_TAUS, *TAUS)])
    chosen: Line = {
        "kind": "chosen",
        "exit_layer": first.exit_layer,
        "length": fixed.length,
        "tau": whole.tau,
        "serial_tau": serial.tau,
        "ahead": s,
        "simulated_ahead": simulated.ahead,
    }
    arms = [
        Arm(name="plain", length=0),
        fixed,
        Arm(name="svip"),
        Arm(name="dv"),
        *(Arm(name="spide", tau=tau, ahead=s) for tau in TAUS),
        *(Arm(name="serial", tau=tau) for tau in TAUS),
        Arm(name="fixed, parallel", length=fixed.length, ahead=s),
        replace(simulated, name="simulated"),
        ours,
        ours_serial,
    ]
    return chosen, arms


def score(arms: Sequence[Arm], texts: Sequence[DraftedText], done: Callable[[str], None]) -> list[Line]:
    """A line for every arm and text."""
    lines = []
    for arm in arms:
        lines += [outcome(arm, text, calls) for text, calls in zip(texts, run_arm(arm, texts))]
        done(arm.name)
    return lines
