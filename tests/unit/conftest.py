"""What takes longest begins first: the other processes of a run have enough to do until it has ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

LONG = ("test_code_rules.py", "test_run_all.py", "test_site.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.fixture(autouse=True)
def _log_of_each_test() -> Iterator[None]:
    """A program sets its log up once, for its process; here, many do in one."""
    yield
    structlog.reset_defaults()
