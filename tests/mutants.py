"""Draw one-line mutants with a fixed seed, and run tests against each: `python -m tests.mutants --seed 52 --count 60 --list`.

Without --list each mutant is written into a copy of the tree and tested. Exit status 1 if one survives.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TESTS = {
    "selfspec/engine": ["tests/exact", "tests/law", "tests/engine"],
    "selfspec/cache": ["tests/exact", "tests/cache"],
    "policies": ["tests/exact", "tests/policies", "tests/pacer", "tests/law"],
    "layerskip_models/checkpoints": ["tests/exact", "tests/models"],
    "selfspec/serve": ["tests/serve"],
}
"""The folders that are mutated, and the tests that are tried first for each, in this order; all others come after these."""
LEFT_OUT = ("__init__.py", "graphs.py")  # whose tests need Triton
COMPARE = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
           ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}  # fmt: skip
BINARY = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "+"}
QUIET = {"log", "logger", "warn", "warnings", "print", "cast"}
RETURNS = 0.3  # of those that return None so many are taken, or they would be most of all


class Mutant(NamedTuple):
    """A line, and what becomes of it."""

    path: str
    line: int
    old: str
    new: str


def changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Every fault of this node itself: the part that is replaced, and by what."""
    text = ast.unparse
    match node:
        case ast.Compare(left, [operator], [right]):
            yield node, f"{text(left)} {COMPARE[type(operator)]} {text(right)}"
        case ast.BoolOp(operator, values):
            yield node, f"({(' or ' if isinstance(operator, ast.And) else ' and ').join(map(text, values))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield node, f"bool({text(operand)})"
        case ast.BinOp(left, operator, right) if type(operator) in BINARY and not isinstance(left, ast.Constant):
            yield node, f"({text(left)} {BINARY[type(operator)]} {text(right)})"
        case ast.Constant(value) if type(value) is int:
            yield node, str(value + 1)
        case ast.Slice(lower, upper):
            yield from ((bound, f"({text(bound)} + 1)") for bound in (lower, upper) if bound is not None)
        case ast.IfExp(test, body, other):
            yield node, f"({text(other)} if {text(test)} else {text(body)})"
        case ast.If(test, _, [first, *_]) if not isinstance(first, ast.If):
            yield test, f"not ({text(test)})"  # the branches change places
        case ast.Return(value) if value is not None and text(value) not in ("None", "self"):
            yield node, "return None"
        case ast.AugAssign() | ast.Delete() | ast.Expr(ast.Call()):
            yield node, "pass"


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All but messages, docstrings, annotations, imports and logging."""
    if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)):
        return
    if isinstance(node, ast.Call) and QUIET & {*ast.unparse(node.func).lower().split(".")}:
        return
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in ("annotation", "returns", "type_params"):
                yield from nodes(child)


def draw(seed: int, count: int) -> list[Mutant]:
    random, lines = Random(seed), dict[tuple[str, int], list[Mutant]]()
    for path in sorted(path for folder in TESTS for path in (ROOT / folder).rglob("*.py")):
        name, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8").splitlines()
        if any(part in name for part in LEFT_OUT):
            continue
        for node in nodes(ast.parse("\n".join(source))):
            for part, new in changes(node):
                old = source[part.lineno - 1]
                if part.lineno == part.end_lineno and old.isascii():
                    changed = old[: part.col_offset] + new + old[part.end_col_offset :]
                    lines.setdefault((name, part.lineno), []).append(Mutant(name, part.lineno, old, changed))
    places, drawn = [*lines], list[Mutant]()
    while len(drawn) < count:
        mutant = random.choice(lines[random.choice(places)])
        if mutant not in drawn and (mutant.new.strip() != "return None" or random.random() < RETURNS):
            drawn.append(mutant)
    return drawn


def killed_by(mutant: Mutant, tests: list[str], timeout: float) -> str | None:
    """The test that fails first, or None if all pass."""
    with tempfile.TemporaryDirectory(prefix="mutant") as folder:
        copy = Path(folder, "tree")
        skipped = shutil.ignore_patterns(".git", "build", "__pycache__", ".venv", ".gpu", ".*_cache")
        shutil.copytree(ROOT, copy, ignore=skipped, symlinks=True)
        lines = (copy / mutant.path).read_text(encoding="utf-8").split("\n")
        nearest = min((i for i, line in enumerate(lines) if line == mutant.old), key=lambda i: abs(i + 1 - mutant.line))
        lines[nearest] = mutant.new
        (copy / mutant.path).write_text("\n".join(lines), encoding="utf-8")
        if not tests:
            first = next(tests for folder, tests in TESTS.items() if mutant.path.startswith(folder))
            every = (path for path in sorted((copy / "tests").iterdir()) if [*path.rglob("test_*.py")])
            others = (path.relative_to(copy).as_posix() for path in every if path.name not in LEFT_OUT)
            tests = [name for name in dict.fromkeys((*first, *others)) if (copy / name).exists()]
        for name in tests:
            command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=no", name]
            kept = str(ROOT / "build" / "bytecode")
            environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONPYCACHEPREFIX": kept}
            environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else every run compiles PyTorch anew
            try:
                done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True,
                                      timeout=timeout, check=False)  # fmt: skip
            except subprocess.TimeoutExpired:
                return f"the time limit in {name}"
            if done.returncode not in (0, 5):  # 5: no tests
                failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return failed[0].split(" - ")[0] if failed else f"{name}, which ends with {done.returncode}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=52)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--list", action="store_true", help="Print the mutants, and run nothing.")
    parser.add_argument("--only", type=int, nargs="+", help="Numbers of the mutants (default: all).")
    parser.add_argument(
        "--tests", nargs="+", default=[], help="Files or folders, in place of those of the mutant's folder."
    )
    parser.add_argument("--timeout", type=float, default=900, help="Seconds for each file or folder (default 900).")
    given, survived = parser.parse_args(), 0
    for number, mutant in enumerate(draw(given.seed, given.count)):
        if given.only is None or number in given.only:
            print(f"{number}: {mutant.path}:{mutant.line}: {mutant.old.strip()}  ->  {mutant.new.strip()}", flush=True)
            if not given.list:
                found = killed_by(mutant, given.tests, given.timeout)
                survived += found is None
                print("    survived" if found is None else f"    killed by {found}", flush=True)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
