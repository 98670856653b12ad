"""Policies of one's own by name: a class of a file, `FILE.py:CLASS`, or of a package that names it as an entry point.

A class with a method `plan` is an exit policy, one with `stop_before_draw` a stopping policy.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from runpy import run_path
from typing import Any

from policies.base import ExitPolicy, StoppingPolicy
from policies.building import Setup

ENTRY_POINTS = "selfspec.policies"
"""The group in which an installed package names its classes."""


def own_class(name: str) -> type[Any] | None:
    """Return the class that a name means, None if it means none. A file is run, once in a process.

    Raises ValueError for a file that is not there or fails, and for a class that is not there or no policy.
    """
    file, _, wanted = name.rpartition(":")
    if file.endswith(".py"):
        defined = _run(Path(file).resolve())
        found = defined.get(wanted)
        if not isinstance(found, type):
            own = (value for value in defined.values() if getattr(value, "__module__", "") == defined["__name__"])
            known = ", ".join(value.__name__ for value in own if isinstance(value, type))
            raise ValueError(f"{file} has no class {wanted!r}; it defines {known or 'none'}")
    else:
        entry = named_by_packages().get(name)
        try:
            found = None if entry is None else entry.load()
        except Exception as error:
            raise ValueError(f"{name}, of an installed package, fails: {type(error).__name__}: {error}") from error
    if found is not None and not hasattr(found, "plan") and not hasattr(found, "stop_before_draw"):
        raise ValueError(f"{wanted!r} is no policy: it has neither plan, as exit policies have, nor stop_before_draw")
    return found


def build_own(found: type[Any], setup: Setup, **values: Any) -> Any:
    """Make one of a class, by its `from_args` if it has one.

    Raises ValueError if an argument is missing or wrong, or a part of a policy.
    """
    try:
        made = found.from_args(setup, **values) if hasattr(found, "from_args") else found(**values)
    except ValueError:
        raise
    except Exception as error:
        kind = "" if isinstance(error, TypeError) else f"{type(error).__name__}: "
        raise ValueError(f"{found.__name__} cannot be made: {kind}{error}") from error
    needed, parent = (ExitPolicy, "StatelessPolicy") if hasattr(found, "plan") else (StoppingPolicy, "NeverStop")
    missing = [name for name in dir(needed) if not name.startswith("_") and not hasattr(made, name)]
    if missing:
        raise ValueError(f"{found.__name__!r} lacks {', '.join(missing)}: let it inherit policies.{parent}")
    return made


@cache
def named_by_packages() -> dict[str, Any]:
    """Return the entry points by name, without loading them. Packages that are installed later are not seen."""
    from importlib.metadata import entry_points  # which takes long to import

    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


@cache
def _run(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    known = {*sys.modules}
    sys.path.insert(0, str(path.parent))  # for what it imports from beside it
    try:
        return run_path(str(path), run_name=f"policies of {path}")
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path.name} fails: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
        for name in {*sys.modules} - known:  # a file elsewhere may have a neighbour of the same name
            if Path(getattr(sys.modules[name], "__file__", None) or "").parent == path.parent:
                del sys.modules[name]
