"""Reads the documentation for the tests: its pages, their code blocks and tables, and the texts of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- run by (\S+): (.*?) -->\n$")
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")
GAP = "…"  # what stands for a value in a text


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. `run_by` is the test that executes it, with its name there, or empty."""

    page: str
    language: str
    text: str
    run_by: str
    name: str

    @property
    def commands(self) -> list[str]:
        """Return its lines without comments, lines that a backslash continues joined."""
        joined = re.sub(r"\\\n\s*", " ", self.text)
        lines = (re.sub(r"(^|\s{2,})# .*$", "", line).strip() for line in joined.splitlines())
        return [line for line in lines if line]


def blocks() -> Iterator[Block]:
    for path in PAGES:
        text = path.read_text()
        for found in FENCE.finditer(text):
            mark = MARK.search(text[: found.start()])
            name = str(path.relative_to(ROOT))
            yield Block(name, found[2], found[3], mark[1] if mark else "", mark[2] if mark else "")


def block(page: str, name: str) -> Block:
    """Return the block of a page that a test executes under that name."""
    (found,) = (one for one in blocks() if one.page == page and one.name == name)
    return found


def without_blocks(text: str) -> str:
    return FENCE.sub("", text)


def cells(line: str) -> list[str]:
    """Return the cells of a row of a table."""
    return [cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def quoted(text: str) -> list[str]:
    """Return what stands between backticks."""
    return re.findall(r"`([^`]+)`", text)


@cache
def modules() -> dict[Path, ast.Module]:
    """Return the modules of shim and platform, without generated ones."""
    found = (path for package in ("kybernate_shim", "kybernate") for path in (ROOT / package).rglob("*.py"))
    return {path: ast.parse(path.read_text()) for path in sorted(found) if not GENERATED.search(path.name)}


def text_of(node: ast.expr) -> str | None:
    """Return a string of the code with a gap for each value, None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(GAP if isinstance(part, ast.FormattedValue) else str(part.value) for part in node.values)  # type: ignore[attr-defined]
    return None


@cache
def all_texts() -> tuple[str, ...]:
    """Return every string of the code but its docstrings."""
    nodes = [node for tree in modules().values() for node in ast.walk(tree)]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = (text_of(node) for node in nodes if isinstance(node, ast.expr) and id(node) not in docstrings)
    return tuple(text for text in texts if text is not None)
