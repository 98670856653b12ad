"""Imports point one way: the leaves know neither each other nor the engine, and nothing knows bench."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

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


FILES = [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]
CORE = sorted((ROOT / "selfspec" / "engine").rglob("*.py")) + sorted((ROOT / "selfspec" / "cache").rglob("*.py"))


def test_everything_exported_says_what_it_is() -> None:
    for package in (layerskip_models, policies, selfspec):
        exported = {name: getattr(package, name) for name in package.__all__}
        assert not [name for name, value in exported.items() if callable(value) and not (value.__doc__ or "").strip()]


def test_a_class_name_stands_for_one_thing() -> None:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in FILES:
        name = str(path.relative_to(ROOT))
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].add(name)
    assert not {name: paths for name, paths in found.items() if len(paths) > 1}


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
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "relative imports hide where an arrow points"
            found += [(node.module, alias.name) for alias in node.names]
        found += module_imports(node, every)
    return found


def packages(source: str) -> set[str]:
    return {module.partition(".")[0] for module, _ in module_imports(ast.parse(source), every=True)}


def test_no_arrow_points_up() -> None:
    """And the engine knows neither its command line nor its analysis."""
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(MAY_IMPORT)
    for path in FILES:
        own = packages(path.read_text(encoding="utf-8")) & {*MAY_IMPORT, "tests"}
        assert own <= MAY_IMPORT[path.relative_to(ROOT).parts[0]], path
    for path in CORE:
        above = r"^\s*(from|import) selfspec\.(cli|analysis|serve)\b"
        assert not re.search(above, path.read_text(encoding="utf-8"), re.MULTILINE), path
    source = "import torch\ndef late():\n    from selfspec.engine.draft import Draft\n    import bench.run as cli\n"
    assert packages(source) == {"torch", "selfspec", "bench"}


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
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files)
    return {name: path.read_text(encoding="utf-8") for name, path in zip(names, files)}


def test_no_imports_go_in_a_circle() -> None:
    """In policies not even those of types."""
    assert not circles(sources_of(FILES))
    own = [path for path in FILES if path.relative_to(ROOT).parts[0] == "policies"]
    assert not circles(sources_of(own), every=True)


def depth(graph: dict[str, set[str]], module: str) -> int:
    """Modules on the longest way down from this one, itself included. The graph must have no circle."""
    return 1 + max((depth(graph, used) for used in graph[module]), default=0)


def test_imports_of_the_engine_are_not_deep() -> None:
    """A round rests on six levels of the engine's own files, and what drives the rounds on three more."""
    graph = import_graph(sources_of(CORE))
    assert depth(graph, "selfspec.engine.round") <= 7
    assert max(depth(graph, module) for module in graph) <= 10


def test_depth_is_counted_and_a_circle_is_seen() -> None:
    graph = import_graph({"a": "import b\nimport c\n", "b": "import c\n", "c": "import torch\n"})
    assert [depth(graph, module) for module in "abc"] == [3, 2, 1]
    sources = {"a": "import b\n", "b": "from c import d\n", "c": "import a\n", "e": "import a\n", "f": ""}
    assert circles(sources) == {"a", "b", "c", "e"}  # and what depends on it
    late = {"a": "if TYPE_CHECKING:\n    import b\n", "b": "def late():\n    import a\n"}
    assert not circles(late)
    assert circles(late, every=True) == {"a", "b"}
