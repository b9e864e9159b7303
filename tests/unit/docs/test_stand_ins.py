"""tests/README.md names what in tests stands in for something real, and nothing that is not there."""

from __future__ import annotations

import re

from tests.documentation import ROOT

TESTS = ROOT / "tests"
PAGE = (TESTS / "README.md").read_text()
SPANS = re.findall(r"`([^`\n]+)`", PAGE)


def test_every_stand_in_is_listed() -> None:
    found = [path for path in (TESTS / "fakes").iterdir() if not path.name.startswith("__")]
    found += [path for folder in ("unit", "contract", "system") for path in (TESTS / folder).rglob("fake_*.py")]
    names = " ".join(SPANS)
    assert [path.name for path in found if path.name not in names] == []


def test_what_is_listed_is_there() -> None:
    paths = [span.split()[0] for span in SPANS if span.startswith("tests/")]
    assert [path for path in paths if not list(ROOT.glob(path))] == []
