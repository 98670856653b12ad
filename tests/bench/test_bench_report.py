"""Tables of records by hand: speeds, intervals over prompts, fixed settings as a yardstick, tables of documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.commands.compare_command import compare_records
from bench.record import Line, matching
from bench.report import interval_tables
from bench.report.page import tables, update
from bench.report.run_tables import PHASES
from bench.report.summary import Samples
from bench.report.table import Spread

PLAIN, DRAFTING, OTHER = "selfspec:ar", "selfspec:ls:1-2", "llama.cpp"
LABELS = {PLAIN: "selfspec, plain", DRAFTING: "selfspec, ls:1-2", OTHER: "llama.cpp"}
WHERE = {
    "device": "cpu", "cpu": "AMD EPYC", "microarchitecture": "Zen 3", "cores": 2, "threads": 2, "ram_gib": 4.0,
    "dtype": "float32", "python": "3", "torch": "2", "transformers": "5", "os": "Linux", "commit": "0123456789ab",
    "load_average": 0.1, "kernels": "avx2", "time": "2026-11-20T10:00:00", "command": "selfspec-bench peers",
}  # fmt: skip


def record() -> list[Line]:
    """Two prompts, three repeats. Medians: llama.cpp 10 s and 20 s; plain 5 s and 10 s; drafting 2 s and 4 s."""
    configuration = {"model": "the demo model", "max_new_tokens": 100, "repeats": 3}
    lines: list[Line] = [{"kind": "run", "command": "peers", "configuration": configuration, "provenance": dict(WHERE)}]
    lines += [{"kind": "engine", "engine": name, "label": label, "weights": None} for name, label in LABELS.items()]
    times = {
        PLAIN: {"a1": (5, 5, 5), "b1": (10, 10, 10)},
        DRAFTING: {"a1": (2, 2.5, 1), "b1": (4, 5, 2)},
        OTHER: {"a1": (10, 50, 8), "b1": (20, 25, 10)},
    }
    loaded_layers = {PLAIN: 990, DRAFTING: 495}
    phases = {f"{phase}_seconds": 1.0 for phase in PHASES}
    stats = {"num_new_tokens": 100, "preverifier_layers": 0, "seconds": 7.0, **phases}
    for engine, by_prompt in times.items():
        own = stats | {"loaded_layers": loaded_layers[engine]} if engine in loaded_layers else None
        for prompt, seconds in by_prompt.items():
            about = {"engine": engine, "prompt": prompt}
            sample = {"kind": "sample", "task": prompt[0], "num_prompt_tokens": 10, "num_new_tokens": 100, "stats": own}
            for repeat, value in enumerate(seconds):
                clock = {"seconds": value, "time_to_first_token": value / 4, "decode_seconds": value / 2}
                lines.append(sample | about | clock | {"repeat": repeat})
            equal = {"first_difference": None, "reference_logit_gap": None, "near_tie": None}
            lines.append({"kind": "output", "output": "", "reference": PLAIN} | about | equal)
    return lines


def rows_of(lines: list[Line], name: str) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for row in {table.name: table for table in tables(lines)}[name].rows}


def test_speeds_by_hand() -> None:
    samples = Samples(record())
    # llama.cpp: (100/10 + 100/20) / 2 = 7.5. Repeats alone: (10 + 5)/2, (2 + 4)/2, (12.5 + 10)/2.
    assert samples.speed(OTHER) == Spread(value=7.5, low=3.0, high=11.25)
    # drafting: (50 + 25) / 2 = 37.5, of repeats alone 37.5, 30, 75. Over plain, (20 + 10) / 2 = 15 each time.
    assert samples.speedup(DRAFTING, PLAIN) == Spread(value=2.5, low=2.0, high=5.0)
    assert samples.speed(PLAIN, "b").value == 10
    # The prompt, 10 tokens, takes a quarter of the time, .5 and 1 s: 20 and 10. Decoding takes half of it: 99 tokens in 1 and
    # 2 s, 74.25. Whole answers: 50 and 25.
    assert rows_of(record(), "engines")["selfspec, ls:1-2"] == ("15", "74", "38")
    # Ratios within a repeat: 2.5, 2, 5 on both prompts.
    assert rows_of(record(), "ratios")["ls:1-2 ÷ plain, decoding"] == ("2.50", "2.50", "2.50 (2.50–2.50)")
    assert rows_of(record(), "ratios")["plain ÷ llama.cpp, prompts"] == ("2.00", "2.00", "2.00 (2.00–2.00)")


def test_speeds_by_bits() -> None:
    """Medians of two prompts: 100 tokens in 5 and 10 s plainly, in 2 and 4 s with drafts, in 10 and 20 s by the other."""
    assert "bits" not in {table.name for table in tables(record())}
    labels = {PLAIN: "selfspec, plain", DRAFTING: "selfspec Q8_0, plain", OTHER: "OpenVINO GenAI, ov-int4"}
    lines = [line | ({"label": labels[line["engine"]]} if line["kind"] == "engine" else {}) for line in record()]
    assert rows_of(lines, "bits") == {"selfspec, plain": ("15", "38", "–"), "OpenVINO GenAI": ("–", "–", "8")}


def test_mismatches_are_shown_near_ties_apart_and_lost_engines_not_at_all() -> None:
    lines = record()
    del lines[-2]  # one of llama.cpp's samples
    assert list(rows_of(lines, "speed")) == [LABELS[PLAIN], LABELS[DRAFTING]]
    outputs = matching(lines, "output", engine=DRAFTING)
    outputs[0].update(first_difference=4, near_tie=True)
    # 4 of one prompt's 100 tokens are before the difference, and all of the other's: 52 %.
    assert rows_of(lines, "rounds")["selfspec, ls:1-2"][-1] == "near-ties: 1 (52 % equal)"
    outputs[1].update(first_difference=4, near_tie=False)
    assert rows_of(lines, "rounds")["selfspec, ls:1-2"][-1] == "near-ties: 1, DIFFERENT: 1 (4 % equal)"


def write(path: Path, lines: list[Line]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"kind": "end"}]), encoding="utf-8")
    return path


def test_compare_says_what_changed(invoke: Any, tmp_path: Path) -> None:
    before, after = record(), record()
    after[0]["provenance"]["threads"] = 64
    for line in matching(after, "sample", engine=PLAIN):
        line["seconds"] /= 2
    for line in matching(after, "output", engine=OTHER):
        line["output"] = "another"
    notes, table = compare_records(before, after)
    assert notes == ["threads: 2 -> 64"]
    rows = {row[0]: row for row in table.rows}
    assert (rows[LABELS[PLAIN]][3], rows[LABELS[PLAIN]][-1]) == ("2.00×", "equal")
    assert (rows["llama.cpp"][3], rows["llama.cpp"][-1]) == ("1.00×", "2 of 2 differ")
    paths = [write(tmp_path / f"{name}.jsonl", lines) for name, lines in (("a", before), ("b", after))]
    said = invoke("compare", *paths).output
    assert "threads:" in said and "2.00×" in said
    with pytest.raises(ValueError, match="no engine in common"):
        compare_records(before, before[:1])


RUN = '{"kind": "run", "command": "run", "configuration": {"model": "m"}, "provenance": {}}\n'
END = '{"kind": "end"}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no record at"),
        ("", "is not a record of selfspec-bench"),
        (RUN + '{"kind": "sam\n' + END, "line 2 is not JSON"),
        (RUN + "[1]\n", 'line 2 is no object with a "kind"'),
        (RUN, "broke off: give its command again"),
        (RUN + END, "lacks lines or fields that its tables need"),
        (RUN.replace('"command": "run"', '"command": "sweep"') + END, "lacks lines or fields that its tables need"),
        (RUN.replace('"command": "run"', '"command": "spide"') + END, "makes no tables of records of 'spide'"),
    ],
)
def test_a_missing_or_damaged_record_is_one_line(text: str | None, message: str, invoke: Any, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    (line,) = invoke("report", path, status=2).stderr.splitlines()
    assert message in line


def test_tables_of_documents(tmp_path: Path) -> None:
    write(tmp_path / "x.jsonl", record())
    text = "Before\n\n<!-- table: x.jsonl engines -->\nold\n<!-- /table -->\n\nafter\n"
    once = update(text, tmp_path)
    assert once.startswith("Before\n\n<!-- table: x.jsonl engines -->\n**the demo model: engines side by side")
    source = "Commit 0123456, 2026-11-20, AMD EPYC Zen 3, AVX2 kernels."
    assert f"| llama.cpp | 3 | 15 | 8 |\n\n{source}\n<!-- /table -->" in once
    assert once.endswith("\n\nafter\n") and update(once, tmp_path) == once
    with pytest.raises(ValueError, match="has no table 'speeds', but engines, ratios"):
        update(text.replace("engines", "speeds"), tmp_path)


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_documents_hold_the_tables_of_their_records() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert [update(text, ROOT) for text in texts] == texts
    assert sum(text.count("<!-- table: bench/results/") for text in texts) > 8


def test_an_interval_covers_what_other_prompts_might_have_given() -> None:
    """Shares of prompts right: of 100, 30 were. The normal interval is .3 +- 1.96 * sqrt(.3 * .7 / 100) = .21 to .39."""
    right, one = np.array([1.0] * 30 + [0.0] * 70), np.ones(100)
    text = interval_tables.interval((right, one), (one, one), ["a"] * 100)
    low, high = (float(end) for end in text.partition("(")[2].rstrip(")").split("–"))
    assert text.startswith("0.300 (")
    assert (low, high) == (pytest.approx(0.21, abs=0.015), pytest.approx(0.39, abs=0.015))


def test_rows_are_divided_by_plain_decoding_and_by_the_best_fixed_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """198 tokens in 990 layers over 198 in 1980, 2.0. One prompt a task: every draw is the same."""
    monkeypatch.setattr(interval_tables, "FEWEST", 2)
    (table,) = [table for table in tables(record()) if table.name == "intervals"]
    assert table.columns[2] == "over the best fixed setting's, `ls:1-2`"
    # Drafting (50 + 25) / 2 tokens/s, plain (20 + 10) / 2.
    assert table.rows == (("`ls:1-2`", "2.000 (2.000–2.000)", "1.000 (1.000–1.000)", "2.500 (2.500–2.500)"),)
