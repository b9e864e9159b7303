"""Which modules of the code import which, and the circles in that."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from tests.documentation import ROOT


def module_name(path: Path, root: Path = ROOT) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imports(trees: Mapping[str, ast.Module], *, for_types: bool) -> dict[str, set[str]]:
    """Return what each module imports of the others, also in its functions; those for type checkers alone on request.

    A package counts for itself: `from package import module` is an import of the module.
    """
    return {name: set(_imported(name, tree, trees, for_types=for_types)) for name, tree in trees.items()}


def _imported(name: str, tree: ast.Module, known: Collection[str], *, for_types: bool) -> Iterator[str]:
    ignored = set() if for_types else {id(one) for block in ast.walk(tree) for one in _type_imports(block)}
    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [one if one in known else node.module for one in whole]
        else:
            continue
        yield from (one for one in found if one in known and one != name)


def _type_imports(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        yield from (one for line in node.body for one in ast.walk(line))


def circles(graph: Mapping[str, Collection[str]]) -> list[frozenset[str]]:
    """Return each set of modules that reach each other."""
    reached = {name: _reached(graph, name) for name in graph}
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted((one for one in found if one), key=sorted)


def _reached(graph: Mapping[str, Collection[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for one in graph[waiting.pop()]:
            if one not in seen:
                seen.add(one)
                waiting.append(one)
    return seen
