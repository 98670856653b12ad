"""What a wheel holds that is built from this tree: the product, and nothing that only its makers would run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = ("bench", "layerskip_models", "policies", "selfspec")
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
"""All files in the wheel that are no Python, but the native library."""


def test_a_wheel_holds_all_modules_of_the_product_and_no_test_study_or_record(tmp_path: Path) -> None:
    """A folder without __init__.py works in a checkout, and is missing from the wheel."""
    pytest.importorskip("setuptools.command.bdist_wheel")
    tree, built = tmp_path / "tree", tmp_path / "built"
    unbuilt = shutil.ignore_patterns(".*", "build", "__pycache__", "*.egg-info", "*.so")
    shutil.copytree(ROOT, tree, ignore=unbuilt)
    environment = {**os.environ, "CC": "false"}  # nothing is compiled here: setup.py goes on without the library
    command = [
        sys.executable,
        "setup.py",
        "--quiet",
        "bdist_wheel",
        "--compression",
        "stored",
        "--dist-dir",
        str(built),
    ]
    subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True)
    (wheel,) = built.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {path.relative_to(tree).as_posix() for top in PRODUCT for path in (tree / top).rglob("*.py")}
    assert found == modules | DATA
