"""The tables of SPIDE's arms: Cost, accepted runs and modelled speed, over tau, and with s by eq. 6 and by simulation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.record import Line, matching
from bench.report.table import Table, counted, subject

LABELS = {
    "plain": "plain decoding",
    "fixed": "speculative decoding, {length} drafts",
    "svip": "SVIP, 0.6",
    "dv": "Draft & Verify, 0.8",
    "spide": "SPIDE, tau {tau}, s {ahead}",
    "fixed, parallel": "without dynamic drafts: {length}, s {ahead}",
    "serial": "without parallel verification, tau {tau}",
    "simulated": "SPIDE, tau {tau}, s {ahead} by simulation",
    "ours": "the same with our bins, tau {tau}",
    "ours, serial": "without parallel verification, our bins, tau {tau}",
}
_RESAMPLES = 2000


def spide_headline(lines: Sequence[Line]) -> str:
    """What was played, in a sentence or two."""
    texts = matching(lines, "text")
    told = []
    for chosen in matching(lines, "chosen"):
        whole, fixed = _arm(lines, chosen, "spide"), _arm(lines, chosen, "fixed")
        cost, speed = _calls(whole) / _calls(fixed), _speed(whole) / _speed(fixed)
        told.append(f"exit layer {chosen['exit_layer']}: Cost {cost:.2f}, {speed:.2f} times as fast on two devices")
    return (
        f"{subject(lines)}. SPIDE against drafts of a fixed length, {counted(len(texts), 'text')}: {'; '.join(told)}."
        f" Settings were chosen on {counted(len(lines[0]['configuration']['tuning_prompts']), 'other text')}."
    )


def spide_tables(lines: Sequence[Line]) -> list[Table]:
    """The arms on all texts and on those that do not loop, tau, and s."""
    loops = {line["prompt"] for line in matching(lines, "text") if line["looping"]}
    free = [line for line in lines if line.get("prompt") not in loops]
    texts = len(matching(lines, "text"))
    tables = [_arms(lines, "spide_arms", f"SPIDE and its parts, {texts} texts, settings chosen on others")]
    if 0 < len(loops) < texts:
        title = f"The same on the {texts - len(loops)} texts that do not end in a loop"
        tables.append(_arms(free, "spide_free", title))
    return [*tables, _taus(lines), _lengths(lines)]


def _arm(lines: Sequence[Line], chosen: Line, name: str) -> list[Line]:
    """The lines of an arm at an exit layer; of several taus at the one that was chosen."""
    found = matching(lines, "arm", exit_layer=chosen["exit_layer"], arm=name)
    tau = {"spide": chosen["tau"], "serial": chosen["serial_tau"]}.get(name)
    return found if tau is None else [line for line in found if line["tau"] == tau]


def _calls(lines: Sequence[Line]) -> float:
    return float(sum(line["calls"] for line in lines))


def _speed(lines: Sequence[Line], device: str = "two_devices") -> float:
    return float(sum(line["tokens"] for line in lines) / sum(line[device] for line in lines))


def _arms(lines: Sequence[Line], name: str, title: str) -> Table:
    rows = []
    for chosen in matching(lines, "chosen"):
        fixed, plain = _arm(lines, chosen, "fixed"), _arm(lines, chosen, "plain")
        for arm, label in LABELS.items():
            found = _arm(lines, chosen, arm)
            low, high = interval(found, fixed, "two_devices")
            spread = "" if arm in ("plain", "fixed") else f" ({low:.2f} to {high:.2f})"
            rows.append(
                {
                    "arm": label.format(**found[0]),
                    "exit layer": str(chosen["exit_layer"]),
                    "Cost": "–" if arm == "plain" else f"{_calls(found) / _calls(fixed):.2f}",
                    "accepted in a row": "–" if arm == "plain" else f"{_in_a_row(found):.2f}",
                    "drafts per token": f"{_per_token(found):.2f}",
                    "two devices": f"{_speed(found) / _speed(plain):.2f}",
                    "over fixed length": f"{_speed(found) / _speed(fixed):.2f}{spread}",
                    "one device": f"{_speed(found, 'one_device') / _speed(plain, 'one_device'):.2f}",
                }
            )
    return Table.of(name, title, rows)


def _in_a_row(lines: Sequence[Line]) -> float:
    return float(sum(line["accepted"] for line in lines) / max(sum(line["runs"] for line in lines), 1))


def _per_token(lines: Sequence[Line]) -> float:
    return float(sum(line["drafts"] for line in lines) / sum(line["tokens"] for line in lines))


def _taus(lines: Sequence[Line]) -> Table:
    rows = []
    for tau in sorted({line["tau"] for line in matching(lines, "arm", arm="spide")}):
        row = {"tau": str(tau)}
        for chosen in matching(lines, "chosen"):
            layer = chosen["exit_layer"]
            fixed = _arm(lines, chosen, "fixed")
            for arm, short in (("spide", "SPIDE"), ("serial", "serial")):
                found = matching(lines, "arm", exit_layer=layer, arm=arm, tau=tau)
                row[f"{short}, exit {layer}: Cost"] = f"{_calls(found) / _calls(fixed):.2f}"
                row[f"{short}, exit {layer}: speed"] = f"{_speed(found) / _speed(fixed):.2f}"
        rows.append(row)
    return Table.of("spide_tau", "Cost and speed on two devices over those of a fixed length, by tau", rows)


def _lengths(lines: Sequence[Line]) -> Table:
    rows = []
    for chosen in matching(lines, "chosen"):
        fixed = _arm(lines, chosen, "fixed")
        row = {"exit layer": str(chosen["exit_layer"])}
        for arm, how, length in (
            ("spide", "eq. 6", chosen["ahead"]),
            ("simulated", "simulation", chosen["simulated_ahead"]),
        ):
            found = _arm(lines, chosen, arm)
            row |= {
                f"s by {how}": str(length),
                f"Cost, {how}": f"{_calls(found) / _calls(fixed):.2f}",
                f"speed, {how}": f"{_speed(found) / _speed(fixed):.2f}",
            }
        rows.append(row)
    return Table.of("spide_ahead", "Drafts ahead, s, by eq. 6 and by simulation", rows)


def interval(found: Sequence[Line], base: Sequence[Line], cost: str) -> tuple[float, float]:
    """95 % of the ratio of two arms' tokens per cost over texts drawn again, both arms with the same ones.

    A paired bootstrap with a fixed seed. cost: the field of a line that has it.
    """
    names = sorted({line["prompt"] for line in found})
    drawn = np.random.default_rng(0).integers(len(names), size=(_RESAMPLES, len(names)))

    def rates(lines: Sequence[Line]) -> NDArray[np.float64]:
        by_prompt = {line["prompt"]: line for line in lines}
        tokens, costs = (np.array([float(by_prompt[name][field]) for name in names]) for field in ("tokens", cost))
        return np.asarray(tokens[drawn].sum(1) / costs[drawn].sum(1))

    low, high = np.percentile(rates(found) / rates(base), [2.5, 97.5])
    return float(low), float(high)
