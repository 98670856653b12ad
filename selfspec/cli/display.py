"""Output of the command line: the summary, the comparison, coloured tokens, a trace."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from rich.color import ColorSystem
from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style
from rich.text import Text

from policies import RoundRecord
from selfspec.analysis.comparison import Comparison
from selfspec.cli.console import visible, visible_line
from selfspec.detokenize import TokenSource
from selfspec.engine.results import sources_text
from selfspec.generator import GenerationResult

SOURCE_STYLES: dict[TokenSource, Style] = {
    "target": Style.null(),
    "accepted": Style(color="green"),
    "copied": Style(color="magenta"),
    "corrected": Style(color="yellow", bold=True),
    "bonus": Style(color="cyan"),
    "rejected": Style(color="red", dim=True, strike=True),
}
PROMPT_STYLE = Style(dim=True)
_LEGEND: dict[TokenSource, str] = {
    "accepted": "accepted draft", "copied": "accepted copy", "rejected": "dropped draft",
    "corrected": "correction of one", "bonus": "bonus after a whole draft", "target": "no draft",
}  # fmt: skip


class TextWriter:
    """Writes generated text, unchanged to a file and styled to a terminal; rich's print expands tabs and drops characters."""

    def __init__(self, console: Console) -> None:
        self._file = console.file
        self.is_terminal = console.is_terminal
        colors = COLOR_SYSTEMS.get(console.color_system or "")
        self._colors = None if colors is ColorSystem.WINDOWS else colors  # such a console has no escape sequences
        self._plain = console.no_color

    @property
    def shows_styles(self) -> bool:
        return self._colors is not None

    def write(self, text: str, style: Style | None = None) -> None:
        if text:
            text = visible(text) if self.is_terminal else text
            encoding = getattr(self._file, "encoding", None) or "utf-8"  # which may lack a character
            text = text.encode(encoding, "backslashreplace").decode(encoding)
            style = style or Style.null()
            shown = style.without_color if self._plain else style
            self._file.write(shown.render(text, color_system=self._colors))
            self._file.flush()

    def write_token(self, text: str, source: TokenSource) -> None:
        """Write a chunk in the style of its source. Rejected drafts are written only if styles are on."""
        if source == "rejected":
            if not self.shows_styles:
                return
            text = visible_line(text)  # a rejected newline must not break the line
        self.write(text, SOURCE_STYLES[source])


def save_drafts(path: Path, title: str, prompt: str, tokens: Iterable[tuple[str, TokenSource]]) -> None:
    """Write tokens with their sources as an SVG picture of a terminal, with a legend, without references to fonts."""
    console = Console(record=True, file=io.StringIO(), width=100, highlight=False)
    text = Text().append(visible(prompt), PROMPT_STYLE)
    for token, source in tokens:
        text.append(visible_line(token) if source == "rejected" else visible(token), SOURCE_STYLES[source])
    console.print(text, "", legend(styles_shown=True), sep="\n")
    picture = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=title), flags=re.DOTALL)
    path.write_text(picture, encoding="utf-8")


def legend(styles_shown: bool) -> Text:
    """Say what the styles of `write_token` mean; if they are off, how to turn them on."""
    if not styles_shown:
        return Text("colours are off, standard output is not a terminal; FORCE_COLOR=1 turns them on")
    return Text(", ").join(Text(meaning, SOURCE_STYLES[source]) for source, meaning in _LEGEND.items())


def summary_lines(result: GenerationResult, stop_reason: str) -> list[str]:
    stats, speculation = result.stats, "nothing drafted"
    if stats.acceptance_rate is not None:
        speculation = (
            f"acceptance rate {stats.acceptance_rate:.3f} ({stats.num_accepted} of {stats.num_drafted} drafts), "
            f"{stats.accepted_per_round:.2f} accepted/round, {stats.tokens_per_round:.2f} tokens/round"
        )
    lines = [
        f"{stats.num_new_tokens} tokens in {_in_seconds(stats.seconds)}, {stats.tokens_per_second:.1f} tokens/s; "
        f"first token after {_in_seconds(stats.time_to_first_token)}; stop reason: {stop_reason}",
        f"policy {result.policy}: {stats.rounds} round{'' if stats.rounds == 1 else 's'}, {speculation}",
    ]
    if stats.num_copied:
        lines.append(f"  {sources_text(stats)}")
    if stats.calibration_seconds >= 0.01:
        prepared = _in_seconds(stats.calibration_seconds)
        lines.append(f"of that time {prepared} to prepare the policy, once per model and process")
    return lines


def comparison_lines(comparison: Comparison, policy: str) -> list[str]:
    rows = [(policy, comparison.runs), ("ar (plain decoding)", comparison.baseline_runs)]
    width = max(len(name) for name, _ in rows)
    which = f"the middle one of {comparison.repeats} pairs of runs" if comparison.repeats > 1 else "a pair of runs"
    lines = [f"comparison, {which}, which took turns after a warm-up"]
    for name, runs in rows:
        run = runs[comparison.middle]
        speed, first = f"{run.tokens_per_second:8.1f} tokens/s", _in_seconds(run.time_to_first_token)
        lines.append(f"  {name:{width}}  {speed}  {_in_seconds(run.seconds):>8}  first token {first}")
    verdict = {
        True: "outputs equal",
        None: "outputs not compared: sampled texts differ, their distribution is the same",
        False: f"OUTPUTS DIFFER from new token {comparison.first_difference} on: a near-tie of two tokens can do that "
        "(float64 decides: --dtype float64)",
    }[comparison.outputs_equal]
    spread = f"{comparison.speedup_min:.2f} to {comparison.speedup_max:.2f}"
    return [*lines, f"speed-up {comparison.speedup:.2f} ({spread}); {verdict}"]


def write_trace(path: Path, records: Iterable[RoundRecord]) -> None:
    """Write one JSON object per line and round, without shadow tokens."""
    names = [field.name for field in fields(RoundRecord) if field.name not in ("shadow", "rejected")]
    lines = []
    for record in records:
        found = {name: getattr(record, name) for name in names}
        if record.acceptance is not None:
            found["acceptance"] = {str(drafter): rate for drafter, rate in record.acceptance.items()}
        lines.append(json.dumps(found) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def _in_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
