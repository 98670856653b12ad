"""Imports point one way: the leaves know neither each other nor the engine, and nothing knows bench."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

import layerskip_models
import policies
import selfspec

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "layerskip_models": {"layerskip_models"},
    "policies": {"policies"},
    "selfspec": {"selfspec", "layerskip_models", "policies"},
    "bench": {"bench", "selfspec", "layerskip_models", "policies"},
}


def imported(source: str) -> set[str]:
    """Top-level names of the modules that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where an arrow points"
            assert node.module is not None
            names.add(node.module.partition(".")[0])
    return names


FILES = [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_arrow_points_up(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    own = imported(path.read_text(encoding="utf-8")) & ({*MAY_IMPORT, "tests"})
    assert own <= MAY_IMPORT[package]


CORE = sorted((ROOT / "selfspec" / "engine").rglob("*.py")) + sorted((ROOT / "selfspec" / "cache").rglob("*.py"))


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_engine_knows_neither_its_command_line_nor_its_analysis(path: Path) -> None:
    assert not re.search(
        r"^\s*(from|import) selfspec\.(cli|analysis|serve|distributed)\b",
        path.read_text(encoding="utf-8"),
        re.MULTILINE,
    )


@pytest.mark.parametrize("package", [layerskip_models, policies, selfspec], ids=lambda package: package.__name__)
def test_everything_exported_says_what_it_is(package: ModuleType) -> None:
    for name in package.__all__:
        exported = getattr(package, name)
        if callable(exported):
            assert (exported.__doc__ or "").strip(), name


def test_a_class_name_stands_for_one_thing() -> None:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in FILES:
        name = str(path.relative_to(ROOT))
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].add(name)
    several = {name: sorted(paths) for name, paths in found.items() if len(paths) > 1}
    assert not several


def test_there_are_files_to_read() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(MAY_IMPORT)
    assert len(FILES) > 20


def test_an_arrow_that_points_up_is_seen() -> None:
    source = "import torch\ndef late():\n    from selfspec.engine.draft import Draft\n    import bench.run as cli\n"
    assert imported(source) == {"torch", "selfspec", "bench"}


def module_imports(tree: ast.AST, every: bool = False) -> list[tuple[str, str | None]]:
    """(module, name) of all that a file imports when it is imported itself. every: also inside functions and for types."""
    found: list[tuple[str, str | None]] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not every:
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not every:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found += [(node.module, alias.name) for alias in node.names]
        found += module_imports(node, every)
    return found


def import_graph(sources: dict[str, str], every: bool = False) -> dict[str, set[str]]:
    """What each module imports of the others. sources: by the modules' names. every: as in `module_imports`."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        named = [(f"{base}.{name}", base) for base, name in module_imports(ast.parse(source), every)]
        graph[module] = {inner if inner in sources else base for inner, base in named} & sources.keys() - {module}
    return graph


def circles(sources: dict[str, str], every: bool = False) -> set[str]:
    """Modules that import themselves through others. every: as in `module_imports`."""
    graph = import_graph(sources, every)
    while leaves := {module for module, uses in graph.items() if not uses}:
        graph = {module: uses - leaves for module, uses in graph.items() if module not in leaves}
    return set(graph)


def sources_of(files: list[Path]) -> dict[str, str]:
    """By the modules' names."""
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files)
    return {name: path.read_text(encoding="utf-8") for name, path in zip(names, files)}


def test_no_imports_go_in_a_circle() -> None:
    assert not circles(sources_of(FILES))


def test_in_policies_not_even_types_go_in_a_circle() -> None:
    assert not circles(
        sources_of([path for path in FILES if path.relative_to(ROOT).parts[0] == "policies"]), every=True
    )


def depth(graph: dict[str, set[str]], module: str) -> int:
    """Modules on the longest way down from this one, itself included. The graph must have no circle."""
    return 1 + max((depth(graph, used) for used in graph[module]), default=0)


def test_imports_of_the_engine_are_not_deep() -> None:
    """A round rests on six levels of the engine's own files, and what drives the rounds on three more."""
    graph = import_graph(sources_of(CORE))
    assert depth(graph, "selfspec.engine.round") <= 7
    assert max(depth(graph, module) for module in graph) <= 10


def test_depth_is_counted() -> None:
    graph = import_graph({"a": "import b\nimport c\n", "b": "import c\n", "c": "import torch\n"})
    assert [depth(graph, module) for module in "abc"] == [3, 2, 1]


def test_a_circle_is_seen() -> None:
    sources = {"a": "import b\n", "b": "from c import d\n", "c": "import a\n", "e": "import a\n", "f": ""}
    assert circles(sources) == {"a", "b", "c", "e"}  # and what depends on it
    late = {"a": "if TYPE_CHECKING:\n    import b\n", "b": "def late():\n    import a\n"}
    assert not circles(late)
    assert circles(late, every=True) == {"a", "b"}
