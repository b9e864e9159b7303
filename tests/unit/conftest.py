"""What takes longest begins first: the other processes of a run have enough to do until it has ended."""

from __future__ import annotations

import pytest

LONG = ("test_code_rules.py", "test_run_all.py", "test_site.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
