"""A headless Chromium for tests of the web page, as one of its readers has."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from kybernate.page.access import Role
from tests.browser.scripted import Scripted, Served, served, small_node

TIMEOUT_MS = 15_000


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, which `tests/run_all.py` installs."""
    path = shutil.which("chromium")
    assert path, "no chromium: apt-get install -y --no-install-recommends chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])  # CI runs as root
        yield browser
        browser.close()


@pytest.fixture
def source() -> Scripted:
    """A small node."""
    return Scripted(small_node())


@pytest.fixture
def page_server(source: Scripted, tmp_path: Path) -> Iterator[Served]:
    with served(source, tmp_path) as page:
        yield page


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser without cookies. A script or a policy that fails fails the test."""
    context = browser.new_context()
    context.set_default_timeout(TIMEOUT_MS)
    yield context
    context.close()


def logged_in(context: BrowserContext, page_server: Served, role: Role = Role.OPERATOR) -> Page:
    """Return a tab that has followed a link and is on the overview."""
    tab = context.new_page()
    problems: list[str] = []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    tab.goto(page_server.login(role))
    tab.get_by_role("button", name="Log in with this link").click()
    tab.get_by_role("heading", name="GPUs").wait_for()
    assert not problems, problems
    return tab
