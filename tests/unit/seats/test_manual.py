"""docs/seats.md has each rule with its test, each key with its default, and an example that can be read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from kybernate.seats.configuration import RULES, TOP, read_yaml
from tests.documentation import ROOT, blocks, cells, quoted

PAGE = (ROOT / "docs/seats.md").read_text()
TESTS = Path(__file__).with_name("test_rules.py")


def rows(header: str) -> list[list[str]]:
    table = re.search(rf"^\| {header} \|.*?(?=\n\n|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert table is not None
    return [cells(line) for line in table[0].splitlines()[2:]]


def test_every_rule_has_its_test() -> None:
    functions = [one.name for one in ast.parse(TESTS.read_text()).body if isinstance(one, ast.FunctionDef)]
    named = [quoted(row[-1])[0] for row in rows("rule")]
    assert named == [name for name in functions if name.startswith("test_")]


def test_every_key_has_its_row() -> None:
    named = {key for row in rows("key") for key in quoted(row[0])}
    wanted = {one for one in TOP if one not in ("rules", "gpuTopology")}
    assert named == wanted | {f"rules.{one}" for one in RULES} | {"gpuTopology.groups"}


def test_the_example_is_read() -> None:
    (example,) = [one for one in blocks() if one.page == "docs/seats.md" and one.language == "yaml"]
    assert len(read_yaml(example.text, "seats.yaml").profiles) == 3
