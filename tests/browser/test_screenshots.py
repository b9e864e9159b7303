"""The manual's screenshots are made again, and those that it has were made with the page as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from kybernate.page.view import Event, Gpu, Operation, Put, Share, Step
from tests.browser.conftest import logged_in
from tests.browser.screenshots import ALL, MADE, REPOSITORY, SHOWN, Screenshot, made_by, marked, page_digest
from tests.browser.scripted import GIB, Scripted, recorded, served, small_node

NOW = 1_790_000_000.0
BYTES = 250_000


def busy_node() -> Scripted:
    """Return a node on which a model has just slept and another wakes."""
    source = Scripted(small_node(NOW))
    shares = (Share("k8s.io/a", 28 * GIB), Share("k8s.io/b", 9 * GIB))
    source.say(Put(Gpu("GPU-0", 0, "NVIDIA H100", 80 * GIB, 39 * GIB, shares)))
    for n, seconds in enumerate((0.61, 0.58, 0.9, 0.55, 0.57, 0.62, 1.4, 0.6)):
        for key, title in (("k8s.io/a", "default/llama/server"), ("k8s.io/b", "default/qwen/server")):
            began = NOW - 900 + 100 * n
            steps = (Step("copy", seconds - 0.05, 24 * GIB), Step("unlock", 0.05))
            source.say(
                Put(
                    Operation(
                        f"{n}{key}",
                        "resume",
                        "succeeded",
                        key,
                        title,
                        created=began,
                        ended=began + seconds,
                        steps=steps,
                    )
                )
            )
    waking = Operation(
        "9", "resume", "running", "k8s.io/b", "default/qwen/server", created=NOW - 1, step="copy", done=9 * GIB,
        total=24 * GIB, seconds_left=0.8,
    )  # fmt: skip
    source.say(Put(waking))
    for n, (type, text) in enumerate((("container.suspended", "qwen was suspended"), ("operation.started", "resume"))):
        source.say(Put(Event(n + 1, NOW - 60 + 59 * n, type, "info", text, "b")))
    source.lines = ["INFO: loading weights", "INFO: 24.0 GiB in 31.4 s", "INFO: Uvicorn running on http://0.0.0.0:8000"]
    return source


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.file)
def test_screenshot_is_of_this_page(browser: Browser, tmp_path: Path, one: Screenshot) -> None:
    context = browser.new_context(
        viewport={"width": one.width, "height": one.height},
        color_scheme=one.scheme,  # type: ignore[arg-type]  # one of playwright's words
        locale="en-GB",
        timezone_id="UTC",
    )
    source = recorded(Path(__file__).with_name(one.state)) if one.state else busy_node()
    with served(source, tmp_path) as page_server:
        tab = logged_in(context, page_server)
        tab.goto(page_server.url + one.path)
        expect(tab.locator("[data-section=operations]")).to_contain_text(one.settled)
        png = marked(tab.screenshot(animations="disabled"), page_digest())
    context.close()
    MADE.mkdir(parents=True, exist_ok=True)
    (MADE / one.file).write_bytes(png)
    assert made_by(png) == page_digest()
    assert len(png) < BYTES
    assert (SHOWN / one.file).exists(), f"{one.file}: run `make docs`, which takes it from {MADE}"
    shown = made_by((SHOWN / one.file).read_bytes())
    assert shown == page_digest(), f"{one.file} shows the page as it was: run `make docs`, and commit it"


def test_manual_shows_each() -> None:
    text = (REPOSITORY / "docs/page.md").read_text()
    assert set(re.findall(r"\]\((page-[a-z]+\.png)\)", text)) == {one.file for one in ALL}
