"""docs/troubleshooting.md knows every error of the code, by class and by message, and every event of the log."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from tests.documentation import GAP, ROOT, all_texts, cells, modules, quoted, text_of

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
# Caught where they are raised, or the parents of those that are raised: no user ever reads them.
INTERNAL = {
    "Stopped", "CudaError", "Failed",
    "ImageClosed", "NotAnswered",
    "NotUnderstood",
    "OperationUndone", "OutcomeUnknown", "PartBroken", "PartNotRead",
    "TooLarge", "VramError", "_Again", "_Refused",
}  # fmt: skip
BUILT_IN = {"TimeoutError", "OSError", "ChildProcessError", "ValueError", "FileNotFoundError", "LookupError"}
SHORT = 12  # a text that has fewer letters says nothing by itself


@dataclass(frozen=True)
class Row:
    """A row of the page: the parts of messages that it names, whether it stands for all, and the errors."""

    parts: tuple[str, ...]
    all: bool
    errors: tuple[str, ...]


def rows() -> Iterator[Row]:
    for table in re.findall(r"^\| message \|.*?(?=\n\n|\Z)", PAGE, re.MULTILINE | re.DOTALL):
        for line in table.splitlines()[2:]:
            message, *_, errors = cells(line)
            yield Row(tuple(quoted(message)), message.startswith("any:"), tuple(quoted(errors)))


ROWS = tuple(rows())


def error_classes() -> set[str]:
    """Return the names of all exceptions that the code defines."""
    bases: dict[str, set[str]] = {}
    for tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(ast.unparse(base).rpartition(".")[2] for base in node.bases)
    known = {"Exception", "OSError", "ProcessLookupError", "FileNotFoundError", "ConnectionError"}
    while more := {name for name, above in bases.items() if above & known} - known:
        known |= more
    return known & bases.keys()


def raised() -> Iterator[tuple[str, str, str]]:
    """Yield class, message and place of every `raise` whose message stands there."""
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            texts = [text for argument in node.exc.args if (text := text_of(argument)) is not None]
            for text in texts:
                if len(re.sub(rf"[\s{GAP}]", "", text)) >= SHORT:
                    yield ast.unparse(node.exc.func), text, f"{path.relative_to(ROOT)}:{node.lineno}"


def has(part: str, texts: Sequence[str]) -> bool:
    pattern = re.compile(".*".join(map(re.escape, part.split(GAP))), re.DOTALL)
    return any(pattern.search(text) for text in texts)


def test_every_error_of_the_code_is_explained() -> None:
    assert error_classes() - set(quoted(PAGE)) - INTERNAL == set()


def test_every_error_that_is_explained_exists() -> None:
    named = {error for row in ROWS for error in row.errors}
    assert named - error_classes() - BUILT_IN == set()
    assert error_classes() >= INTERNAL


@pytest.mark.parametrize("part", sorted({part for row in ROWS for part in row.parts}))
def test_message_that_is_quoted_is_one_of_the_code(part: str) -> None:
    assert has(part, all_texts())


def test_every_message_is_explained() -> None:
    """A message is found on the page by one of its parts, unless a row stands for all messages of its class."""
    covered = {error for row in ROWS if row.all for error in row.errors}
    named = {error for row in ROWS for error in row.errors}
    unknown = [
        f"{place}: {error}: {text}"
        for error, text, place in raised()
        if error in named - covered - BUILT_IN
        and not any(has(part, [text]) for row in ROWS if error in row.errors for part in row.parts)
    ]
    assert not unknown, "\n".join(unknown)


def facts(module: str, name: str) -> set[str]:
    """Return the first arguments of all calls of `name` in a module, where they are texts."""
    calls = (node for node in ast.walk(modules()[ROOT / module]) if isinstance(node, ast.Call))
    named = (call for call in calls if ast.unparse(call.func) == name and call.args)
    return {text for call in named if (text := text_of(call.args[0])) is not None}


@pytest.mark.parametrize(
    ("module", "name"), [("gpu/preflight.py", "Objection"), ("checkpoint/compat.py", "Difference")], ids=["gpu", "node"]
)
def test_every_fact_that_is_refused_is_explained(module: str, name: str) -> None:
    found = facts(f"kybernate_shim/{module}", name)
    assert found
    assert found - set(quoted(PAGE)) == set()


def test_every_event_of_the_log_is_explained() -> None:
    """Of levels that ask for attention."""
    events = {
        text
        for tree in modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and re.search(r"\b_?log\.(warning|error)$", ast.unparse(node.func))
        and (text := text_of(node.args[0])) is not None
    }
    section = set(quoted(PAGE.partition("## Log events")[2]))
    assert {event for event in events if GAP not in event} - section == set()
    for pattern in (event for event in events if GAP in event):
        assert any(re.fullmatch(re.escape(pattern).replace(GAP, ".*"), name) for name in section), pattern
