"""The pages say what is there: generated tables, files, make's targets, links and their anchors, the words we use."""

from __future__ import annotations

import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

from kybernate.install.containerd import PROGRAM_PLACE
from tests.documentation import NOT_OUR_WORDS, PAGES, ROOT, without_blocks
from tools.generate_docs import MARKED, TABLES, generated

FOLDERS = "kybernate_shim|kybernate|packaging|runtimeclass|tests|tools|proto|docs"
FILE = re.compile(rf"`((?:{FOLDERS})/[\w./-]*\w)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
WALK = "### From `ctr tasks checkpoint` to the manifest"
README_LINES = 150

pages = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


@pages
def test_generated_tables_are_those_of_the_code(page: Path) -> None:
    text = page.read_text()
    assert text == generated(text), "`make docs` writes them"


def test_every_generated_table_is_on_a_page() -> None:
    assert {found[2] for page in PAGES for found in MARKED.finditer(page.read_text())} == set(TABLES)


@pages
def test_every_file_that_is_named_exists(page: Path) -> None:
    names = FILE.findall(page.read_text())
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_way_to_the_manifest_names_each_file_once() -> None:
    walk = (ROOT / "docs/architecture.md").read_text().partition(WALK)[2].partition("\n## ")[0]
    names = FILE.findall(walk)
    assert names[0].endswith("ttrpc/server.py")
    assert names[-1].endswith("checkpoint/image/store.py")
    assert len(names) == len(set(names))


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(page.read_text()), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pages
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(without_blocks(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        place = (page.parent / name).resolve() if name else page
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), f"{target}: there are {sorted(anchors(place))}"


@pages
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = {word for line in targets for word in line.split()}
    assert set(re.findall(r"`make ([a-z][a-z-]*)", page.read_text())) <= known


def test_readme_is_a_screen_and_a_bit() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_programs_are_not_people(page: Path) -> None:
    text = page.read_text()
    assert re.findall(NOT_OUR_WORDS, re.sub(r"`[^`]*`", "", text)) == []


@pytest.mark.parametrize("path", sorted((ROOT / "packaging" / "containerd").glob("*.toml")), ids=lambda path: path.name)
def test_packaged_configuration_names_the_shim_where_the_installation_puts_it(path: Path) -> None:
    (cri,) = tomllib.loads(path.read_text())["plugins"].values()
    assert cri["containerd"]["runtimes"]["kybernate"]["runtime_path"] == "/usr/local/bin/containerd-shim-kybernate-v1"
    assert PROGRAM_PLACE == "/usr/local/bin/containerd-shim-kybernate-v1"
    assert f"`{PROGRAM_PLACE}`" in (ROOT / "docs/installation.md").read_text()


def test_nothing_that_is_built_is_in_the_repository() -> None:
    files = subprocess.run(["git", "ls-files", "build"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert files == ""
