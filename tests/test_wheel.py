"""What a wheel holds: the product, and nothing that only its makers would run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parent.parent
PRODUCT = {"bench", "layerskip_models", "policies", "selfspec"}
DATA = {
    "bench/py.typed",
    *(f"bench/prompts/{name}.jsonl" for name in ("code", "copying", "english", "math", "translation")),
    "layerskip_models/py.typed",
    *(
        f"layerskip_models/demo/{name}"
        for name in (
            "README.md", "config.json", "generation_config.json", "model.safetensors", "selfspec.json", "tokenizer.json",
            "tokenizer_config.json", "pacer/README.md", "pacer/preverifier.json", "pacer/preverifier.safetensors",
        )
    ),
    "policies/py.typed", "selfspec/py.typed", "selfspec/serve/page.html",
}  # fmt: skip
"""All files in the wheel that are no Python."""


@pytest.fixture(scope="module")
def setuptools_table() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib")  # since Python 3.11
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    return table


@pytest.fixture(scope="module")
def packages(setuptools_table: dict[str, Any]) -> set[str]:
    return set(find_packages(str(ROOT), **setuptools_table["packages"]["find"]))


def test_only_the_product_is_packaged(packages: set[str]) -> None:
    assert {name.partition(".")[0] for name in packages} == PRODUCT


def test_every_module_of_the_product_is_packaged(packages: set[str]) -> None:
    """A folder without __init__.py works in a checkout, and is missing from the wheel."""
    for top in PRODUCT:
        for path in (ROOT / top).rglob("*.py"):
            folder = path.parent.relative_to(ROOT)
            assert ".".join(folder.parts) in packages, path


def test_the_data_files_are_these_and_hold_no_records(setuptools_table: dict[str, Any]) -> None:
    found = {
        str(path.relative_to(ROOT))
        for package, patterns in setuptools_table["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package).glob(pattern)
        if path.is_file()
    }
    assert found == DATA
    assert not setuptools_table["include-package-data"]
