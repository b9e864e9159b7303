"""docs/proxy.md: its tests exist, and its settings are all there are."""

from __future__ import annotations

import re
from dataclasses import fields

from kybernate.proxy.api_errors import Refusal
from kybernate.proxy.settings import Limits, Model, Settings, parse
from tests.documentation import ROOT, blocks

PAGE = (ROOT / "docs/proxy.md").read_text()


def test_each_complaint_names_tests_that_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    files = [*(ROOT / "tests/contract/proxy").glob("*.py"), *(ROOT / "tests/unit/proxy").glob("*.py")]
    written = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    assert named
    assert named - written == set()


def test_settings_on_the_page_are_all_there_are() -> None:
    example = max((one for one in blocks() if one.page == "docs/proxy.md"), key=lambda one: len(one.text))
    model = parse(example.text).models[0]
    assert {one.name for one in fields(Model) if f"{one.name}:" not in PAGE} <= {"name", "namespace"}
    assert model.container
    assert {one.name for one in fields(Limits) if f"`{one.name}`" not in PAGE} == set()
    assert {one.name for one in fields(Settings) if f"\n{one.name}:" not in PAGE} <= {"plane", "haproxy"}


def test_defaults_of_limits_are_those_of_the_page() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PAGE, re.MULTILINE))
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    for one in fields(Limits):
        number, _, unit = rows[one.name].partition(" ")
        assert float(number) * units.get(unit, 1) == one.default


def test_each_reason_of_waiting_is_on_the_page() -> None:
    texts = "".join(path.read_text() for path in (ROOT / "kybernate/proxy").rglob("*.py"))
    named = set(re.findall(rf"{Refusal.__name__}\(\s*(?:503|504|429|502), \"(\w+)\"", texts))
    assert len(named) >= 7
    assert {one for one in named if f"`{one}`" not in PAGE} == set()
