"""Installed packages: what a wheel holds, and what Python imports beside a clone and inside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = ("bench", "layerskip_models", "policies", "selfspec")
DATA = {
    "bench/py.typed",
    *(f"bench/prompts/{name}.jsonl" for name in ("chat", "code", "copying", "english", "math", "translation")),
    *(f"bench/papers/{name}.json" for name in ("dpace", "del", "pacer", "sd2", "spide")),
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


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in a folder with the package's name. Nothing is compiled: the library is this tree's, if it has one."""
    pytest.importorskip("setuptools.command.bdist_wheel")
    tree = tmp_path_factory.mktemp("projects") / "selfspec"
    unbuilt = shutil.ignore_patterns(".*", "build", "__pycache__", "*.egg-info", "*.so")
    shutil.copytree(ROOT, tree, ignore=unbuilt)
    return tree


def installed(clone: Path, how: str) -> Path:
    """Build the clone with the hook that pip calls, without a compiler, and unpack the wheel as pip does."""
    site, code = clone.parent / how, f"import setuptools.build_meta as b, sys; b.{how}(sys.argv[1])"
    environment = {**os.environ, "CC": "false"}
    subprocess.run([sys.executable, "-c", code, str(site)], cwd=clone, env=environment, check=True, capture_output=True)
    (wheel,) = site.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def run(folder: Path, site: Path, code: str) -> str:
    """Run code in a folder, where the package is installed in this site alone; return what it prints and warns of."""
    others = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    code = f"import site, sys\nsite.addsitedir({str(site)!r})\nsys.path += {others!r}\n{code}"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SELFSPEC_NATIVE")}
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_wheel_holds_all_modules_of_the_product_and_no_test_study_or_record(clone: Path) -> None:
    """A folder without __init__.py works in a checkout, and is missing from the wheel."""
    site = installed(clone, "build_wheel")
    found = {path.relative_to(site).as_posix() for top in PRODUCT for path in (site / top).rglob("*.*")}
    modules = {path.relative_to(clone).as_posix() for top in PRODUCT for path in (clone / top).rglob("*.py")}
    assert found == modules | DATA
    code = "from layerskip_models.kernels.library import LIBRARY, kernels\nprint(LIBRARY)\nkernels()"
    library = site / "layerskip_models" / "kernels" / "libkernels.so"
    here = run(clone.parent, site, code)
    assert here.splitlines()[0] == str(library)
    assert "reinstall selfspec on a machine with a C compiler" in here and len(here.splitlines()) == 2
    library.touch()
    inside = run(clone, site, code)
    assert f"sources in {clone}, which Python found before the package installed in {site}: run from" in inside


def test_an_editable_installation_is_found_from_the_folder_of_the_clone(clone: Path) -> None:
    """Whose name is the package's."""
    said = run(clone.parent, installed(clone, "build_editable"), "import selfspec\nprint(selfspec.__file__)")
    assert said.strip() == str(clone / "selfspec" / "__init__.py")
