"""Containers of a user: programs of uid 1000 without capabilities, as most of those in production."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

UID: Final = 1000
# The capabilities that `ctr` gives a container.
GIVEN: Final = (
    "CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID SETFCAP SETPCAP NET_BIND_SERVICE SYS_CHROOT KILL"
    " AUDIT_WRITE"
)


def flags(others: Sequence[str] = ()) -> list[str]:
    """Return ctr's flags for such a container; capabilities that `others` adds stay."""
    dropped = [f"CAP_{name}" for name in GIVEN.split() if f"CAP_{name}" not in others]
    return ["--user", f"{UID}:{UID}", *(word for name in dropped for word in ("--cap-drop", name))]
