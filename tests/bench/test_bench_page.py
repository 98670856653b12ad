"""A record as an HTML page, and two records compared."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.commands.bench_app import app
from bench.record import Line, read_record
from bench.report.compare_records import compare_records
from bench.report.figures import figures
from bench.report.markdown import headings
from bench.report.page import page
from bench.report.summary import Samples

DATA = Path(__file__).parents[2] / "docs" / "data"
VOID = {"meta", "br", "path", "use"}


class Balanced(HTMLParser):
    """Fails on a tag that is closed without having been opened, and collects what the page asks others for."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.mark.parametrize("name", ["run", "sweep", "peers-medium"])
def test_a_page_stands_alone(name: str, tmp_path: Path) -> None:
    record = DATA / f"{name}.jsonl.gz"
    target = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["report", str(record), "-o", str(target)])
    assert result.exit_code == 0, result.output
    text = target.read_text(encoding="utf-8")
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert all(reference.startswith(("#", "data:")) for reference in parser.references)
    assert "@import" not in text
    if name != "sweep":
        for engine in Samples(read_record(record)).labels.values():
            assert engine in text
    assert text.count("<svg") == sum(map(len, figures(read_record(record)).values())) > 0
    if name == "run":
        assert page(read_record(record)) == text  # nothing random or dated
    assert "width=device-width" in text


def test_what_a_run_shows() -> None:
    lines = read_record(DATA / "run.jsonl.gz")
    drawn = {part: list(titles) for part, titles in figures(lines).items()}
    assert drawn["speed"] == ["Speed-up over plain decoding"]
    assert drawn["rounds"] == ["Exit layers", "Drafts per round"]
    assert {"phases", "etpl"} <= drawn.keys() <= headings(lines).keys()


def test_marks_and_markup() -> None:
    lines: list[Line] = json.loads(json.dumps(read_record(DATA / "peers-medium.jsonl.gz")))
    lines[0]["configuration"]["model"] = "<b>&"
    text = page(lines)
    assert "&lt;b&gt;&amp;" in text
    assert "<b>" not in text
    assert "<code>selfspec-bench peers" in text


def test_one_page_one_record(tmp_path: Path) -> None:
    records = [str(DATA / "run.jsonl.gz"), str(DATA / "peers-medium.jsonl.gz")]
    result = CliRunner().invoke(app, ["report", *records, "-o", str(tmp_path / "both.html")])
    assert result.exit_code == 2
    assert "one record" in result.stderr


def test_compare_says_what_changed(tmp_path: Path) -> None:
    before = read_record(DATA / "peers-medium.jsonl.gz")
    after: list[Line] = json.loads(json.dumps(before))
    after[0]["provenance"]["threads"] = 64
    for line in after:
        if line["kind"] == "sample" and line["engine"] == "selfspec:ar":
            line["seconds"] /= 2
        if line["kind"] == "output" and line["engine"] == "transformers:generate":
            line["output"] = "another"
    notes, table = compare_records(before, after)
    assert notes == [f"threads: {before[0]['provenance']['threads']} -> 64"]
    rows = {row[0]: row for row in table.rows}
    assert rows["selfspec, autoregressive"][3] == "2.00×"
    assert rows["selfspec, autoregressive"][-1] == "equal"
    changed = rows["transformers generate"]
    assert changed[3] == "1.00×"
    assert changed[-1] == "2 of 2 differ"
    paths = []
    for name, lines in (("a", before), ("b", after)):
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    result = CliRunner().invoke(app, ["compare", *map(str, paths)])
    assert result.exit_code == 0
    assert "threads:" in result.output
    assert "2.00×" in result.output
    other: list[Line] = [{**before[0], "engines": {"x": "x"}}]
    with pytest.raises(ValueError, match="no engine in common"):
        compare_records(before, other)


def test_markdown_with_its_plots_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "new" / "roofline.md"
    result = CliRunner().invoke(app, ["report", str(DATA / "roofline.jsonl.gz"), "-o", str(target)])
    assert result.exit_code == 0, result.output
    (plot,) = re.findall(r"\]\((plots/[^)]+)\)", target.read_text(encoding="utf-8"))
    assert "% of bandwidth" in (target.parent / plot).read_text(encoding="utf-8")
