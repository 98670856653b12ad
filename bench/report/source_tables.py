"""Where each source of drafts pays, by task: copied from earlier text, drafted by an exit, the model's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

from bench.grid import ALL
from bench.record import PLAIN, Line
from bench.report.summary import Samples
from bench.report.table import Table, number
from selfspec.engine.stats import ratio

COLUMNS = (
    "engine", "× plain", "tokens/round", "copied", "drafted", "model's own", "copies accepted", "drafts accepted",
)  # fmt: skip


def source_tables(samples: Samples) -> list[Table]:
    """Every engine that tells its rounds, task by task; no table where nothing was copied.

    Shares are of all new tokens, over all runs on the task's prompts. Records that were made before drafts could be copied
    have no counts of copies, which stands for 0.
    """
    runs = [line for line in samples.samples if line["stats"]]
    if not any(line["stats"].get("num_copied") for line in runs):
        return []
    tasks = list(dict.fromkeys(samples.tasks.values()))
    rows: list[tuple[str, ...]] = []
    for task in [*tasks, ALL] if len(tasks) > 1 else tasks:
        chosen = tasks if task == ALL else [task]
        rows.append((f"**{task}**", *[""] * (len(COLUMNS) - 1)))
        for engine in samples.engines:
            own = [line["stats"] for line in runs if line["engine"] == engine and line["task"] in chosen]
            if own:
                over_plain = samples.speedup(engine, PLAIN, chosen).value if PLAIN in samples.engines else None
                rows.append((samples.labels[engine], number(over_plain, "{:.2f}×"), *_shares(own)))
    title = "New tokens by source, task by task: copied and accepted, drafted by an exit and accepted, the model's own"
    return [Table(name="sources", title=title, columns=COLUMNS, rows=tuple(rows))]


def _shares(stats: Sequence[Line]) -> tuple[str, ...]:
    """The cells after the speed-up, of these runs together."""

    def total(name: str) -> int:
        return sum(each.get(name, 0) for each in stats)

    new, accepted, drafted = total("num_new_tokens"), total("num_accepted"), total("num_drafted")
    copied, copied_accepted = total("num_copied"), total("num_copied_accepted")
    shares = (copied_accepted / new, (accepted - copied_accepted) / new, 1 - accepted / new)
    rates = ratio(copied_accepted, copied), ratio(accepted - copied_accepted, drafted - copied)
    return (
        number(ratio(new - len(stats), total("rounds")), "{:.2f}"),
        *(number(share, "{:.1f} %", 100) for share in (*shares, *rates)),
    )
