"""As whom containers of the tests run their programs, in one place: a user without capabilities, or root.

Most containers in production are the former, so tests of checkpoints are about them by default (`USERS`). Where root is
the subject, because a test needs a capability or is about one, it says so by `@pytest.mark.as_root("why")`. What the
programs write goes below /tmp, or to a volume that all may write to. tests/unit/test_identity.py finds files that do
neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests import users

TESTS = Path(__file__).parent
# Files of tests, below this folder, whose containers are a user's.
USERS = (
    "test_agent.py", "test_agent_clients.py", "test_agent_inventory.py", "test_agent_operations.py",
    "test_bound_sockets.py", "test_cancel.py", "test_checkpoint*.py", "test_cri.py", "test_cri_archives.py",
    "test_crictl.py", "test_daemon_lasts.py", "test_encryption.py", "test_freeze_time.py", "test_gpu_cancel.py",
    "test_identities.py", "test_image_registry.py", "test_images.py", "test_kinds.py", "test_options.py",
    "test_page.py", "test_peers.py", "test_restor*.py", "test_rootfs.py", "test_systemd.py", "test_tiers.py",
    "test_user_namespaces.py", "test_volumes.py", "gpu/*",
)  # fmt: skip

_user: int | None = None


def set_for(item: pytest.Item) -> None:
    """Have the containers of a test, and of the fixtures that it is the first to use, run as it wants them to."""
    global _user  # what makes containers has no request to ask
    _user = users.UID if is_users(item.path) and item.get_closest_marker("as_root") is None else None


def is_users(file: Path) -> bool:
    """Tell whether the containers of a file's tests are a user's by default."""
    inside = file.relative_to(TESTS) if file.is_relative_to(TESTS) else Path()
    return any(fnmatch(str(inside), pattern) for pattern in USERS)


def user() -> int | None:
    """Return the uid of the programs in containers that are made now, None for what the image says."""
    return _user


def flags(others: Sequence[str] = ()) -> list[str]:
    """Return ctr's flags for that user; capabilities that `others` adds stay."""
    return users.flags(others) if _user is not None else []
