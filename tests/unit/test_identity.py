"""Each file of system tests in which containers are checkpointed says as whom they run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.system.identity import TESTS, USERS, is_users

FILES = sorted(TESTS.rglob("test_*.py"))
# What a file has that checkpoints or restores: names of functions and messages, and words of command lines.
NAMES = re.compile(r"save|checkpoint(ed)?|restored?|(Checkpoint|Restore)\w*")
WORDS = re.compile(r"\b(checkpoint|restore)\b|kybernate\.io/restore-from")


def checkpoints(source: str) -> bool:
    """Tell whether code makes or restores checkpoints; what it says in docstrings and comments does not count."""
    tree = ast.parse(source)
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return any(
        (isinstance(node, ast.Name) and NAMES.fullmatch(node.id))
        or (isinstance(node, ast.Attribute) and NAMES.fullmatch(node.attr))
        or (isinstance(node, ast.Constant) and id(node) not in said and WORDS.search(str(node.value)))
        for node in ast.walk(tree)
    )


def is_roots(source: str) -> bool:
    """Tell whether a file has the mark `as_root` for all its tests."""
    return re.search(r"^pytestmark = .*\bas_root\(", source, re.MULTILINE) is not None


@pytest.mark.parametrize("file", [file for file in FILES if checkpoints(file.read_text())], ids=lambda file: file.name)
def test_file_that_checkpoints_runs_programs_of_a_user_or_says_why_not(file: Path) -> None:
    assert is_users(file) != is_roots(file.read_text()), (
        f'name {file.relative_to(TESTS)} in USERS of tests/system/identity.py, or mark it with as_root("why")'
    )


@pytest.mark.parametrize("pattern", USERS)
def test_every_pattern_names_a_file(pattern: str) -> None:
    assert list(TESTS.glob(pattern))


def test_every_mark_has_a_reason() -> None:
    reasons = [
        node.args[0] if node.args else None
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "as_root"
    ]
    assert reasons
    assert all(isinstance(one, ast.Constant) and len(str(one.value).split()) > 2 for one in reasons)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('kybernate("checkpoint", id, "--exit")', True),
        ('node.sh("kybernate checkpoint loop whole --exit")', True),
        ('flags = ["--annotation", f"kybernate.io/restore-from={image}"]', True),
        ("save(ours, id, image)", True),
        ("agent.operation(name, wire.CheckpointRequest(name=id))", True),
        ("from tests.system.checkpoints import shim_of\nshim_of(ours, id)", False),
        ('def test_one() -> None:\n    """It is as after a restore."""  # of a checkpoint', False),
        ('place = Path("/var/lib/kybernate/checkpoints")', False),
    ],
)
def test_what_counts_as_a_checkpoint(source: str, expected: bool) -> None:
    assert checkpoints(source) is expected
