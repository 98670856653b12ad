"""Every Python example in README and docs runs as printed; every link, file and command that they name exists."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
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


def test_there_are_examples():
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_exist(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def commands_of(app: typer.Typer) -> set[str]:
    group: Any = typer.main.get_command(app)
    return {*group.list_commands(None)}


COMMANDS = {
    "selfspec": commands_of(selfspec_app),
    "selfspec-bench": commands_of(bench_app.app),
}
HISTORY = ROOT / "docs" / "log.md"
"""What was tried keeps the names that it had."""


@pytest.mark.parametrize("page", [page for page in PAGES if page != HISTORY], ids=lambda page: page.name)
def test_files_and_commands_exist(page):
    text = re.sub(r"<!-- report:(\S+) -->.*?<!-- /report:\1 -->", "", page.read_text(encoding="utf-8"), flags=re.S)
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
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in DOCS}


def test_drawings_are_small_and_stand_alone():
    for drawing in (ROOT / "docs" / "pictures").iterdir():
        text = drawing.read_text(encoding="utf-8")
        assert len(text) < 60_000
        assert not re.search(r"(href|url\()\W*https?:", text), drawing.name
