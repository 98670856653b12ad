"""Whether this checkout can become a release: its version, its change log, its files."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.wheels.targets import ReleaseError


def version_to_release(root: Path) -> str:
    """The version in pyproject.toml. Raises ReleaseError, with what to do, if it cannot be released from this checkout."""
    found = re.search(r'^version = "([^"]+)"$', (root / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    if found is None:
        raise ReleaseError('pyproject.toml has no line version = "..." in [project]')
    version = found[1]
    changes = _section((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    if not changes.strip():
        raise ReleaseError(
            f'CHANGELOG.md says nothing about {version}: rename its section "## Unreleased" to "## {version}", '
            "or raise the version in pyproject.toml"
        )
    if _git(root, "tag", "--list", f"v{version}"):
        raise ReleaseError(f"there is a tag v{version} already: raise the version in pyproject.toml")
    changed = _git(root, "status", "--porcelain")
    if changed:
        raise ReleaseError(
            f"commit or remove these changes first, so that the release is what the tag will name:\n{changed}"
        )
    return version


def _section(changes: str, version: str) -> str:
    """What the change log says about a version, without the heading."""
    found = re.search(rf"^## {re.escape(version)}\b[^\n]*\n(.*?)(?=^## |\Z)", changes, re.M | re.S)
    return found[1] if found else ""


def _git(root: Path, *arguments: str) -> str:
    try:
        asked = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ReleaseError(f"a release is made from a git checkout: {error}") from error
    return asked.stdout.strip()
