"""Which settings of each rule are tried: those that its paper gives, and ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

PUBLISHED: dict[str, tuple[str, ...]] = {
    "LayerSkip": ("ls:{E}-4", "ls:{E}-6"),
    "finite state": ("fs:{E}-4", "fs:{E}-6"),
    "Draft & Verify": ("dv:{E},start=0.8",),
    "SVIP": ("svip:{E},threshold=0.6",),
    "AdaEDL": ("adaedl:{E},start=0.4",),
    "SPIDE": tuple(f"spide:{{E}},tau={tau},bins=paper" for tau in (0.5, 0.6, 0.7, 0.8, 0.9)),
}
"""LayerSkip and finite state with the drafts of DEL's tables (4 and 6); the exit layer is of a grid in every paper."""
OURS: dict[str, tuple[str, ...]] = {
    "LayerSkip": tuple(f"ls:{{E}}-{length}" for length in range(1, 9)),
    "finite state": tuple(f"fs:{{E}}-{length}" for length in (1, 2, 4, 6)),
    "Draft & Verify": tuple(f"dv:{{E}},start={start}" for start in (0.1, 0.2, 0.4, 0.6, 0.8)),
    "SVIP": tuple(f"svip:{{E}},threshold={bound}" for bound in (0.4, 0.6, 1.0, 1.4, 1.8)),
    "AdaEDL": tuple(f"adaedl:{{E}},start={start}" for start in (0.1, 0.2, 0.4, 0.6)),
    "SPIDE": tuple(f"spide:{{E}},tau={tau}" for tau in (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)),
}
DEL = (
    "del", "del:alpha=paper", "del:prompt=counted", "del:on_stop=keep", "del:on_stop=keep,prompt=counted",
    "del:on_stop=keep,prompt=counted,alpha=paper", "del:length=tpl", "del:length=tpl,prompt=counted",
)  # fmt: skip
"""DEL has nothing to tune. The fifth is what its text describes, the first what Algorithm 1 prints (but for alpha)."""
OTHERS = ("auto:cost=layers",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A policy to score. rule: whose; settings: "published", "ours", or "" where there are none to choose."""

    rule: str
    settings: str
    policy: str


def candidates(patterns: Sequence[str], exit_layers: Sequence[int]) -> list[str]:
    """The names of a rule's settings at every exit layer."""
    return [pattern.format(E=layer) for pattern in patterns for layer in exit_layers]


def choose(exit_layers: Sequence[int], etpl: Callable[[str], float]) -> list[Chosen]:
    """The best of each rule's published settings and of ours, by their eTPL on the tuning prompts; then what has none.

    SPIDE's published taus are all kept, each at its best exit layer, since the paper gives a range.
    """
    found = []
    for rule, patterns in PUBLISHED.items():
        groups = [(pattern,) for pattern in patterns] if rule == "SPIDE" else [patterns]
        for group in groups:
            best = max(candidates(group, exit_layers), key=etpl)
            found.append(Chosen(rule=rule, settings="published", policy=best))
        best = max(candidates(OURS[rule], exit_layers), key=etpl)
        found.append(Chosen(rule=rule, settings="ours", policy=best))
    found += [Chosen(rule="DEL", settings="", policy=policy) for policy in DEL]
    return [*found, *(Chosen(rule="ours", settings="", policy=policy) for policy in OTHERS)]
