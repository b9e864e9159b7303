"""Write the tables of the manual that are made from the code: `python -m tools.generate_docs`, or `make docs`.

A page marks the place of a table by `<!-- made from FILE -->` and `<!-- end -->`. A test compares pages and code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from kybernate.agent.settings import Settings
from kybernate_shim.config import documenting
from kybernate_shim.task import codes
from kybernate_shim.trust import rights
from tools import api_docs

DOCS = Path(__file__).parents[1] / "docs"
TABLES: Mapping[str, Callable[[], str]] = {
    "proto/node#services": api_docs.calls_table,
    "proto/node#messages": api_docs.messages_table,
    "kybernate/agent/settings.py": lambda: documenting.markdown_table(Settings),
    "kybernate_shim/config/settings.py": documenting.markdown_table,
    "kybernate_shim/task/codes.py": codes.markdown_table,
    "kybernate_shim/trust/rights.py": rights.markdown_table,
}
MARKED = re.compile(r"(<!-- made from (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def generated(page: str) -> str:
    """Return the page with its tables as the code has them. Raises KeyError for a file that makes none."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", page)


if __name__ == "__main__":
    for path in sorted(DOCS.glob("*.md")):
        path.write_text(generated(path.read_text()))
