"""The README says what the code does: its table of settings, and the files and commands that it names."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from kybernate_shim.config import markdown_table
from kybernate_shim.task import codes
from kybernate_shim.trust import rights

ROOT = Path(__file__).parents[2]


README = (ROOT / "README.md").read_text()


def test_table_of_settings_is_that_of_the_code() -> None:
    table = README.partition("<!-- made from kybernate_shim/config.py -->\n")[2].partition("<!-- end -->")[0]
    assert table == markdown_table(), "paste the output of kybernate_shim.config.markdown_table() between the markers"


def test_table_of_rights_is_that_of_the_code() -> None:
    text = (ROOT / "docs/security.md").read_text()
    table = text.partition("<!-- made from kybernate_shim/trust/rights.py -->\n")[2].partition("<!-- end -->")[0]
    assert table == rights.markdown_table(), "paste the output of kybernate_shim.trust.rights.markdown_table() there"


def test_table_of_codes_is_that_of_the_code() -> None:
    text = (ROOT / "docs/errors.md").read_text()
    table = text.partition("<!-- made from kybernate_shim/task/codes.py -->\n")[2].partition("<!-- end -->")[0]
    assert table == codes.markdown_table(), "paste the output of kybernate_shim.task.codes.markdown_table() there"


def test_every_link_of_the_documentation_leads_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = {word for line in targets for word in line.split()}
    assert set(re.findall(r"`?\bmake ([a-z][a-z-]*)", README)) <= known


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\b((?:packaging|runtimeclass|tests)/[\w./-]*\w)", README))))
def test_every_file_that_is_named_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("path", sorted((ROOT / "packaging" / "containerd").glob("*.toml")), ids=lambda path: path.name)
def test_packaged_configuration_names_the_shim_where_the_readme_puts_it(path: Path) -> None:
    (cri,) = tomllib.loads(path.read_text())["plugins"].values()
    assert cri["containerd"]["runtimes"]["kybernate"]["runtime_path"] == "/usr/local/bin/containerd-shim-kybernate-v1"
    assert "/opt/kybernate/bin/python -Im kybernate_shim.launcher /usr/local/bin " in README
