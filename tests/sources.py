"""The project's own files, parsed: what the tests of conventions look at."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
TESTS = ROOT / "tests"

FILES = tuple(sorted((SRC / "agentinfer").rglob("*.py")))
TEST_FILES = tuple(sorted(TESTS.rglob("test_*.py")))

Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_name(path: Path) -> str:
    """The dotted name of a file of src."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = tuple(module_name(path) for path in FILES)


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of *path*."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def place(path: Path, node: ast.stmt | ast.expr, what: str = "") -> str:
    """file:line what, to be read in a failure."""
    return f"{path.relative_to(ROOT)}:{node.lineno} {what}".rstrip()


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain; empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def names_used(path: Path) -> Iterator[tuple[str, ast.stmt | ast.expr]]:
    """Every dotted name that *path* imports or reads, with where it does."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)
        elif isinstance(node, ast.Attribute) and (name := dotted(node)):
            yield name, node


def functions(path: Path) -> Iterator[Function]:
    """Every function of *path*, methods and inner ones included."""
    return (node for node in ast.walk(tree(path)) if isinstance(node, Function))


def public(body: list[ast.stmt]) -> Iterator[Function | ast.ClassDef]:
    """The public functions, classes and methods of a module's or class's *body*."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body)
