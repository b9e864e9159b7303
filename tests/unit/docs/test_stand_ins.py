"""tests/README.md names what in tests stands in for something real, and nothing that is not there.

A module of the tests is such a stand-in if it is in tests/fakes, if its name says so, or if the words at its beginning
do. Those of tests and fixtures say what they use.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documentation import ROOT

TESTS = ROOT / "tests"
PAGE = (TESTS / "README.md").read_text()
SPANS = re.findall(r"`([^`\n]+)`", PAGE)
NAMES = ("fake_*.py", "pretended_*.py", "simulated_*.py")
WORDS = re.compile(r"(?i)\b(stands? in for|pretended|fakes?|simulate[sd]?|imitates?|mimics?|mock(s|ed)?)\b")
LISTED_WHOLE = "tests/fakes/cuda"  # one stand-in of many files
USED = re.compile(r"(?i)\bpretended (gpus?|(cuda )?driver|machine)\b|tests\.fakes\b")  # that one, by what runs on it


def test_every_stand_in_is_listed() -> None:
    found = [*(path for path in (TESTS / "fakes").iterdir() if not path.name.startswith("__")), *stand_ins(TESTS)]
    there = set(listed())
    assert sorted(str(path.relative_to(ROOT)) for path in found if path not in there) == []


def stand_ins(folder: Path) -> Iterator[Path]:
    """Yield the modules below a folder whose names or first words say that they stand in for something."""
    for path in folder.rglob("*.py"):
        if any(path.match(name) for name in NAMES):
            yield path
        elif not (path.match("test_*.py") or path.name == "conftest.py" or path.is_relative_to(ROOT / LISTED_WHOLE)):
            said = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
            if WORDS.search(USED.sub("", said)):
                yield path


def listed() -> Iterator[Path]:
    """Yield what the page names: by its whole path, or by the rest of it after the folder of the path before."""
    folder = TESTS
    for span in SPANS:
        whole = ROOT / span
        if span.startswith("tests/"):
            folder = whole if whole.is_dir() else whole.parent
            yield whole
        else:
            yield folder / span


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.py", "A server that stands in\nfor the real one.", True),
        ("a.py", "A fake shim.", True),
        ("a.py", "A pretended kubelet on the pretended driver.", True),
        ("a.py", "Containers on the pretended GPUs.", False),
        ("a.py", "Programs that stand in the way of a dump.", False),
        ("fake_node.py", "A node.", True),
        ("test_a.py", "Seats of simulated nodes.", False),
    ],
)
def test_words_and_names_that_make_a_stand_in(tmp_path: Path, name: str, text: str, found: bool) -> None:
    (tmp_path / name).write_text(f'"""{text}"""\n')
    assert [path.name for path in stand_ins(tmp_path)] == [name] * found


def test_what_is_listed_is_there() -> None:
    paths = [span.split()[0] for span in SPANS if span.startswith("tests/")]
    assert [path for path in paths if not list(ROOT.glob(path))] == []
