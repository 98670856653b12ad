"""Numbers in sentences come from records: by markers on the pages of results; elsewhere they may only get fewer."""

import re
from pathlib import Path

import pytest

from bench.report.batch_tables import batch_tables
from bench.report.markdown import fill_markers
from bench.report.prose_figures import FIGURE, figure
from bench.report.table import Table
from tests.bench.test_bench_report import record

ROOT = Path(__file__).parents[2]
UNIT = r"(?:%|×|times\b|tokens/s\b|ms\b|µs\b|[GM]B/s\b|MiB\b|GiB\b|MB\b|points\b)"
NUMBER = r"(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
MEASURED = re.compile(
    rf"(?<![\w.:/-]){NUMBER}(?:\s+(?:to|and|or|in place of)\s+{NUMBER})?\s*{UNIT}|(?<![\w.:/-])\d*\.\d+(?![\w.-])"
)
"""A number with a unit of results, or with decimals."""

STRICT = {
    "README.md": {"3.10"},  # a version of Python
    "docs/benchmarks.md": {
        "400 MiB",
        "4 times",
        "10 %",
        "0.001",
        "0.06",
        "0.5",
        "0.4",
        "100 %",
    },  # limits of the method
    "docs/many-texts.md": {"5 %"},  # a constant of `auto`
    "docs/results/exits-and-training.md": set(),
    "docs/results/long-contexts.md": set(),
    "docs/results/many-texts-and-serving.md": set(),
    "docs/results/policies.md": {
        "0.95",
        "0.7",
        "0.75",
        "1.08",
    },  # parameters of DEL and Pacer, costs in SPIDE's paper
    # Advice, sizes of files and of a shape, PyTorch's memory, Llama 3.2.
    "docs/results/speed.md": {"10 %", "93 MB", "400 MiB", "3.2", "32,000 and 657 MB", "100 %"},
}
"""Pages on which each measured number has a marker, and the numbers there that nobody measured."""

TYPED = {
    "docs/copied-drafts.md": 8,
    "docs/exit-adapters.md": 43,
    "docs/fewer-bits.md": 10,
    "docs/kernels.md": 104,
    "docs/many-devices.md": 16,
    "docs/pacer.md": 96,
    "docs/quantised.md": 174,
    "docs/security.md": 35,
    "docs/serving.md": 8,
    "docs/training.md": 180,
    "docs/transformers.md": 18,
}
"""Pages with numbers that no record here made, and how many there are at the most. Lower these; do not raise them: a number
that is measured anew gets a record, or goes to the log with its date."""


def typed_numbers(text):
    """What looks measured in a page, outside of markers, code and links."""
    text = re.sub(r"<!-- report:(\S+) -->.*?<!-- /report:\1 -->", "", text, flags=re.S)
    text = FIGURE.sub("", text)
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    text = re.sub(r"^    .*$", "", text, flags=re.M)
    text = re.sub(r"`[^`\n]*`", "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return [re.sub(r"\s+", " ", found[0]) for found in MEASURED.finditer(text)]


@pytest.mark.parametrize("page", STRICT)
def test_measured_numbers_in_sentences_have_markers(page):
    typed = set(typed_numbers((ROOT / page).read_text(encoding="utf-8")))
    assert typed <= STRICT[page], f"{page}: a number in a sentence needs a marker (bench/report/prose_figures.py)"
    assert typed == STRICT[page], f"{page} no longer says all of these: take them out of STRICT"


@pytest.mark.parametrize("page", TYPED)
def test_numbers_without_a_record_get_fewer(page):
    assert len(typed_numbers((ROOT / page).read_text(encoding="utf-8"))) <= TYPED[page]


def test_pages_of_results_are_all_strict():
    assert {f"docs/results/{page.name}" for page in (ROOT / "docs" / "results").glob("*.md")} <= STRICT.keys()


def test_what_looks_measured():
    text = "It took 28 ms, .75 of it, 2 to 3 % more, 1.46\ntimes. `0.5 ms`, [a](b-1.5.md), 20 prompts, family 26, v1.2."
    assert typed_numbers(text) == ["28 ms", ".75", "2 to 3 %", "1.46 times"]
    marked = "<!-- figure: run > speed > auto > × plain -->1.46<!-- /figure --> times, not 1.5 times"
    assert typed_numbers(marked) == ["1.5 times"]


def test_long_runs_of_fuzzers_have_their_dates():
    rows = re.findall(r"^\| `python -m tests\.(?:fuzz|soak).*$", (ROOT / "docs" / "how-it-works.md").read_text(), re.M)
    assert len(rows) >= 6
    for page, text in [("how-it-works", row) for row in rows] + [
        (name, paragraph)
        for name in ("serving", "replicas", "security")
        for paragraph in (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").split("\n\n")
        if re.search(r"In a soak of|tests\.soak\.killed_replica` tries", paragraph)
    ]:
        assert re.search(r"20\d\d-\d\d-\d\d", text), f"{page} does not say when: {text[:80]}"


TABLE = Table(
    name="speed",
    title="",
    columns=("engine", "`all`", "more"),
    rows=(
        ("**a task**", "", ""),
        ("plain", "1.00", "5 (4–6)"),
        ("*fast, `x`*", "1.50× (1.40–1.60)", "8"),
        ("**b task**", "", ""),
        ("plain", "2.00", "–"),
    ),
)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("fast, x > all", "1.50"),
        ("fast, x > all > low", "1.40"),
        ("fast, x > all > high", "1.60"),
        ("fast, x > all > whole", "1.50× (1.40–1.60)"),
        ("fast, x > all > gain", "50 %"),
        ("a task, plain > more > 1 digit", "5.0"),
        ("b task, plain > all", "2.00"),
        ("plain, 2.00 > all", "2.00"),
        ("fast, x ÷ b task, plain > all > loss", "25 %"),  # 1.5 / 2
        ("fast, x > more ÷ all > 2 digits", "5.33"),  # 8 / 1.5
        ("fast, x ÷ b task, plain > all > share", "75 %"),
    ],
)
def test_figures_by_hand(place, text):
    assert figure(f"speed > {place}", {"speed": TABLE}) == text


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("sped > plain > all", "no part 'sped' .* there are speed"),
        ("speed > plain > al", "no column 'al' .* there are engine, all, more"),
        ("speed > plain > all", "2 rows are 'plain'"),
        ("speed > slow > all", "0 rows are 'slow'"),
        ("speed > b task, plain > more", "no number .* the cell is '–'"),
        ("speed > a task, plain > all > low", "needs a range"),
        ("speed > fast, x ÷ b task, plain > all", "must end in one of gain, loss"),
    ],
)
def test_a_figure_that_is_not_there_is_an_error(place, message):
    with pytest.raises(ValueError, match=message):
        figure(place, {"speed": TABLE})


def test_figures_are_filled_where_their_record_is_given():
    page = "so <!-- figure: peers > speed > drafting > × plain -->9.99<!-- /figure --> times"
    filled = fill_markers(page, {"peers": record()})
    assert filled == "so <!-- figure: peers > speed > drafting > × plain -->2.50<!-- /figure --> times"
    other = "<!-- figure: other > speed > plain > × plain -->1<!-- /figure -->"
    assert fill_markers(page + other, {"peers": record()}) == filled + other


def test_a_pass_that_took_longer_than_one_for_more_texts_is_marked():
    """One text at 20 tokens/s is 50 ms a pass, two at 50 are 40 ms."""
    lines = [{"kind": "run", "engines": {"selfspec:ar": "ar"}}] + [
        {"kind": "batch", "engine": "selfspec:ar", "texts": texts, "seconds": 1.0, "tokens": speed}
        | {"decode_seconds": 1.0, "decode_tokens": speed}
        for texts, speed in ((1, 20), (2, 50), (4, 96))
    ]
    table = batch_tables(lines)[0]
    assert table.rows == (("ar", "20.0† (1.00× one text)", "50.0 (2.50× one text)", "96.0 (4.80× one text)"),)
    assert "†: a pass took longer" in table.title
    lines[1] |= {"decode_tokens": 26}
    assert "†" not in batch_tables(lines)[0].markdown()


VERDICT = re.compile(r"reproduced|refuted here|not shown|not testable here|not measured", re.I)


def ledger_rows():
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    text = re.sub(r"<!-- report:(\S+) -->.*?<!-- /report:\1 -->", "", text, flags=re.S)  # tables of records
    rows = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in text.split("\n") if line.startswith("| ")]
    return [row for row in rows if row[0] != "claim"]


def test_every_claim_of_the_papers_is_decided():
    rows = ledger_rows()
    assert len(rows) > 45
    for row in rows:
        assert len(row) == 4, row
        assert VERDICT.search(row[3]), f"no verdict on {row[0]!r}: {row[3]!r}"


def test_our_numbers_in_the_ledger_have_markers():
    """What a policy is called and set to has none: tau .3, omega .8."""
    for row in ledger_rows():
        typed = {number for number in typed_numbers(f"{row[2]} {row[3]}") if not re.fullmatch(r"0?\.\d+", number)}
        assert not typed, f"{row[0]}: {typed}"
