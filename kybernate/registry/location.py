"""Where this node's registry is. Imports nothing that only a registry needs."""

from __future__ import annotations

from typing import Final

DEFAULT_URL: Final = "sqlite:////var/lib/kybernate/registry.db"


def registry_url() -> str:
    """Return the URL of the registry."""
    return DEFAULT_URL
