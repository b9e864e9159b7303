"""The manual builds as a site, strictly, and a reader's browser fetches nothing from the network for it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documentation import ROOT
from tools.docs_site import SCRIPT

LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*?\ssrc=["']?([^"'\s>]+)|<link\b[^>]*?\shref=["']?([^"'\s>]+)"""
)
IN_STYLES = re.compile(r"""(?:@import\s+|url\()["']?([^"')]+)""")
FAR = re.compile(r"(?:[a-z]+:)?//", re.IGNORECASE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_pages_load_nothing_from_the_network(site: Path) -> None:
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= {path.stem for path in pages}
    loaded = [(path.name, a or b) for path, text in pages.items() for a, b in LOADED.findall(text)]
    assert loaded
    assert [one for one in loaded if FAR.match(one[1])] == []
    styles = [url for path in site.rglob("*.css") for url in IN_STYLES.findall(path.read_text())]
    assert [url for url in styles if FAR.match(url)] == []


def test_page_with_a_diagram_brings_what_draws_it(site: Path) -> None:
    assert (site / SCRIPT).stat().st_size > 0
    pages = [path.read_text() for path in site.rglob("*.html")]
    drawn = [text for text in pages if '<pre class="mermaid">' in text]
    assert drawn
    for text in drawn:
        head = text.partition("</head>")[0]
        assert f'<script src="{SCRIPT}"></script>' in head
