"""The limits of this process."""

from __future__ import annotations

import resource


def raise_descriptors() -> None:
    """Allow as many open descriptors as the kernel lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
