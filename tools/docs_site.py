"""What mkdocs calls while it builds the site: diagrams are drawn by a script that the site brings along.

The theme would load mermaid from a server on the network where a page does not load it before. The script comes out of
a package's files; the package itself is never imported.
"""

from __future__ import annotations

from importlib.metadata import distribution
from typing import Any

from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

PACKAGE, ASSET = "mermaidx", "mermaidx/assets/mermaid.js"
SCRIPT = "assets/javascripts/mermaid.js"


def on_files(files: Any, config: Any) -> Any:
    """Add the script to the site."""
    source = distribution(PACKAGE).locate_file(ASSET)
    files.append(File.generated(config, SCRIPT, abs_src_path=str(source)))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Load the script before the theme looks for it, on pages with a diagram only: it has 3.5 MB."""
    if '<pre class="mermaid">' not in output:
        return output
    script = f'<script src="{get_relative_url(SCRIPT, page.url)}"></script>'
    return output.replace("</head>", f"{script}\n</head>", 1)
