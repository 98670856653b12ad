"""What a release refuses before it builds anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.wheels.readiness import version_to_release
from tests.wheels.targets import ReleaseError


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "selfspec"\nversion = "1.2.0"\n', encoding="utf-8")
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 1.2.0 (2026-12-01)\n\n- News.\n\n## 1.1.0\n\n- Old.\n", encoding="utf-8"
    )
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "all")
    return tmp_path


def test_a_clean_checkout_with_a_described_version(checkout: Path) -> None:
    assert version_to_release(checkout) == "1.2.0"


@pytest.mark.parametrize(
    "changes", ["## Unreleased\n\n- News.\n", "## 1.2.0\n\n## 1.1.0\n\n- Old.\n", "## 1.2.01\n\n- News.\n"]
)
def test_the_change_log_must_describe_the_version(changes: str, checkout: Path) -> None:
    (checkout / "CHANGELOG.md").write_text(changes, encoding="utf-8")
    with pytest.raises(
        ReleaseError, match=r'says nothing about 1\.2\.0: rename its section "## Unreleased" to "## 1\.2\.0"'
    ):
        version_to_release(checkout)


def test_a_version_is_released_once(checkout: Path) -> None:
    git(checkout, "tag", "v1.2.0")
    with pytest.raises(ReleaseError, match=r"there is a tag v1\.2\.0 already: raise the version"):
        version_to_release(checkout)


def test_nothing_that_the_tag_would_not_name(checkout: Path) -> None:
    (checkout / "new.py").write_text("", encoding="utf-8")
    with pytest.raises(ReleaseError, match=r"commit or remove these changes first.*\n.*new\.py"):
        version_to_release(checkout)


def test_a_release_needs_git(tmp_path: Path, checkout: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("pyproject.toml", "CHANGELOG.md"):
        (other / name).write_bytes((checkout / name).read_bytes())
    (other / ".git").write_text("gitdir: nowhere\n", encoding="utf-8")
    with pytest.raises(ReleaseError, match="a release is made from a git checkout"):
        version_to_release(other)
