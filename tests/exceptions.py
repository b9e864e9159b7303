"""Finds the exceptions of shim and platform, and which of them some code distinguishes."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from pathlib import Path

BUILT_IN = frozenset(
    name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
)


def exceptions(trees: Mapping[Path, ast.Module]) -> set[str]:
    """Return the names of all exceptions that modules define."""
    bases: dict[str, set[str]] = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(filter(None, map(_name, node.bases)))
    known = set(BUILT_IN)
    while more := {name for name, above in bases.items() if above & known} - known:
        known |= more
    return known & bases.keys()


def distinguished(trees: Mapping[Path, ast.Module], tables: Mapping[Path, str]) -> set[str]:
    """Return the names of classes that code compares an exception with: in a handler, in a test, or in a table.

    A class that is only constructed, raised, derived from, imported or named in an annotation is not among them.
    `tables` are modules with a table that has names of classes as text, and the table's name.
    """
    found = {name for tree in trees.values() for name in _compared(tree)}
    for path, table in tables.items():
        for node in trees[path].body:
            if isinstance(node, ast.AnnAssign | ast.Assign) and table in ast.unparse(node).partition("=")[0]:
                found |= {
                    one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
                }
    return found


def _compared(tree: ast.Module) -> Iterator[str]:
    passed = {id(part) for node in ast.walk(tree) for root in _not_compared(node) for part in ast.walk(root)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in passed and (name := _name(node)):
            yield name


def _not_compared(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call):
        yield node.func
    elif isinstance(node, ast.ClassDef):
        yield from node.bases
    elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name):
        yield node.exc
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
        yield node.returns
    elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
        yield node.annotation


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
