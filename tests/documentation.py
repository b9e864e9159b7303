"""Reads the documentation for the tests: its pages, their code blocks and tables, and the texts of the code."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- run by (\S+): (.*?) -->\n$")
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")
NOT_OUR_WORDS = (  # of pages and messages; the words of the field are in their place
    r"(?i)\b(somebody|nobody|whoever|(?<!`)tells|anew|at once|in spite of|beside|(?:go|goes|going) on|stands? still"
    r"|lets? go of|under way|for ever|(?<![/.-])cards?(?![/.-])|processors?|crews?|desks?|standstill|hasten\w*|likeness"
    r"|way (?:out|back))\b"
)
COMMENT = {  # by the ending of a file, what its comments look like
    ".py": re.compile(r"#.*"),
    **dict.fromkeys((".c", ".h", ".cu"), re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)),
    ".proto": re.compile(r"(?:^[ \t]*//[^\n]*\n?)+|//[^\n]*", re.MULTILINE),
}
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


def sources() -> Iterator[Path]:
    """Yield the sources of shim, platform, tests and tools, without generated ones."""
    for folder in ("kybernate_shim", "kybernate", "proto", "tests", "tools"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in COMMENT and not GENERATED.search(path.name):
                yield path


def remarks(path: Path, pattern: str) -> list[str]:
    """Return the comments and docstrings of a source that match, one line of text each, without code in backticks."""
    text = path.read_text()
    if not re.search(pattern, _one_line(text)):
        return []  # most have no such word anywhere, and need not be parsed
    found = _python_remarks(text) if path.suffix == ".py" else COMMENT[path.suffix].findall(text)
    lines = [re.sub(r"`[^`]*`", GAP, _one_line(remark)) for remark in found]
    return [line for line in lines if re.search(pattern, line)]


def _one_line(text: str) -> str:
    return re.sub(r"\s*\n[\s*/#]*", " ", text)


def _python_remarks(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    block: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            block.append(token.string)
        elif token.type != tokenize.NL:
            yield "\n".join(block)
            block.clear()


@cache
def all_texts() -> tuple[str, ...]:
    """Return every string of the code but its docstrings."""
    nodes = [node for tree in modules().values() for node in ast.walk(tree)]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = (text_of(node) for node in nodes if isinstance(node, ast.expr) and id(node) not in docstrings)
    return tuple(text for text in texts if text is not None)
