"""Ids in values of extended attributes: users and groups of an ACL, and the root that a file's capabilities are for.

The kernel gives root of the node what it has stored, in the node's ids, and stores what root writes.
Sources: the kernel's posix_acl_xattr.h and capability.h (struct vfs_ns_cap_data); acl(5), capabilities(7).
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final

ACLS: Final = ("system.posix_acl_access", "system.posix_acl_default")
CAPABILITY: Final = "security.capability"

_HEADER: Final = Struct("<I")
_ENTRY: Final = Struct("<HHI")  # tag, permissions, id
_USER, _GROUP = 0x02, 0x08  # the tags of entries with an id
_REVISION, _WITH_ROOT = 0xFF000000, 0x03000000
_ROOT_AT: Final = 20

Owners = Callable[[int, int], tuple[int, int]]  # maps a user and a group to those of another range


def moved_ids(name: str, value: bytes, owners: Owners) -> bytes:
    """Return the value of an attribute with its ids mapped by `owners`; one without ids, or a damaged one, stays."""
    if name in ACLS:
        return _moved_acl(value, owners)
    if name == CAPABILITY and _has_root(value):
        (root,) = _HEADER.unpack_from(value, _ROOT_AT)
        return value[:_ROOT_AT] + _HEADER.pack(owners(root, 0)[0])
    return value


def _has_root(value: bytes) -> bool:
    return len(value) == _ROOT_AT + _HEADER.size and _HEADER.unpack_from(value)[0] & _REVISION == _WITH_ROOT


def _moved_acl(value: bytes, owners: Owners) -> bytes:
    entries = value[_HEADER.size :]
    if len(entries) % _ENTRY.size:
        return value
    moved = value[: _HEADER.size]
    for tag, permissions, id_ in _ENTRY.iter_unpack(entries):
        if tag == _USER:
            id_ = owners(id_, 0)[0]
        elif tag == _GROUP:
            id_ = owners(0, id_)[1]
        moved += _ENTRY.pack(tag, permissions, id_)
    return moved
