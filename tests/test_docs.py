"""Every Python example in README and docs runs as printed; every link, file and command that they name exists."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import transformers  # noqa: F401  # its log keeps the stderr of its first import: not that of one example
import typer

from bench.commands import bench_app
from selfspec.cli.main import app as selfspec_app

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
EXAMPLES = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec"), {"__name__": "__example__"})
    assert "Error" not in capsys.readouterr().err


def anchors(text: str) -> set[str]:
    """Return the addresses of a page's headings, as Python-Markdown makes them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"[`*]", "", heading)).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", words))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_exist(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked.read_text(encoding="utf-8")), f"{page.name} links to {target}#{anchor}"


APPS: dict[str, Any] = {"selfspec": selfspec_app, "selfspec-bench": bench_app.app}
COMMANDS = {name: {*typer.main.get_command(app).list_commands(None)} for name, app in APPS.items()}
HISTORY = ROOT / "docs" / "log.md"
"""What was tried keeps the names that it had."""


@pytest.mark.parametrize("page", [page for page in PAGES if page != HISTORY], ids=lambda page: page.name)
def test_files_and_commands_exist(page):
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"\b(?:bench|layerskip_models|policies|selfspec|tests)/[\w/]+\.(?:py|h|c|json)\b", text):
        assert "NAME" in path or (ROOT / path).exists(), f"{page.name} names {path}"
    for module in re.findall(r"python -m ((?:bench|layerskip_models|selfspec|tests)[\w.]*)", text):
        assert importlib.util.find_spec(module), f"{page.name} runs {module}"
    for program, known in COMMANDS.items():
        named = re.findall(rf"(?:`|^    (?:.* )?(?<!from )){program} ([a-z][a-z-]+)(?=[\s`])", text, re.M)
        for command in named:
            assert command in known, f"{page.name} runs {program} {command}"


def test_pages_that_the_code_names_exist():
    for package in ("bench", "layerskip_models", "policies", "selfspec"):
        for source in (ROOT / package).rglob("*.py"):
            for page in re.findall(r"\bdocs/[\w/-]+\.md", source.read_text(encoding="utf-8")):
                assert (ROOT / page).exists(), f"{source.relative_to(ROOT)} names {page}"


def test_every_page_is_on_the_site():
    assert len(EXAMPLES) >= 3  # or no page was found
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in DOCS}


def test_there_is_no_more_to_read_than_this():
    """A new subject is a section of a page, and what one page says no other page says again."""
    assert len(DOCS) == 18
    assert sum(page.read_text(encoding="utf-8").count("\n") for page in DOCS) <= 3450
    assert (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").count("\n") <= 220


VERDICT = re.compile(r"reproduced|refuted here|not shown|not testable here|not measured", re.I)


def test_every_claim_of_the_papers_is_decided():
    """A table a paper, made from records; each row says what they found, what we found, and ends with a verdict."""
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| claim \| theirs \| .*\| verdict \|\n\|[-:| ]+\|\n((?:\| .*\n)+)", text, re.M)
    rows = [re.split(r"(?<!\\) \| ", line[2:-2]) for table in tables for line in table.splitlines()]
    assert len(tables) == text.count("<!-- table: ") == 5 and 45 < len(rows) <= 60
    for row in rows:
        assert VERDICT.search(row[-1]), f"no verdict on {row[0]!r}: {row[-1]!r}"


MEASURED = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("benchmarks", "copied-drafts", "fewer-bits")),
]


@pytest.mark.parametrize("page", [*MEASURED, ROOT / "docs" / "training.md"], ids=lambda page: page.name)
def test_each_table_of_measurements_says_where_it_comes_from(page):
    """Find a line with commit, date and processor below each table that has a bold title."""
    text = page.read_text(encoding="utf-8")
    for title, after in re.findall(r"^\*\*(.+)\*\*\n\n(?:\|.*\n)+\n(.*)$", text, re.M):
        assert re.match(r"Commit [0-9a-f]{7}, \d{4}-\d\d-\d\d, (AMD EPYC|Intel\(R\) Xeon)", after), (
            f"{page.name}: {title}"
        )
