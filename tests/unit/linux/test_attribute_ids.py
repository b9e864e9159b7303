"""Ids in attributes of files, as the kernel stores them."""

from __future__ import annotations

from struct import pack

from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.linux.attribute_ids import ACLS, CAPABILITY, moved_ids

NOBODY = 0xFFFFFFFF


def moved(user: int, group: int) -> tuple[int, int]:
    """Other users are 100 further, other groups 200."""
    return user + 100, group + 200


def acl(*entries: tuple[int, int, int]) -> bytes:
    return pack("<I", 2) + b"".join(pack("<HHI", *entry) for entry in entries)


def test_users_and_groups_of_an_acl_are_moved_and_its_other_entries_stay() -> None:
    before = acl((1, 6, NOBODY), (2, 4, 7), (4, 4, NOBODY), (8, 5, 8), (16, 7, NOBODY), (32, 0, NOBODY))
    after = acl((1, 6, NOBODY), (2, 4, 107), (4, 4, NOBODY), (8, 5, 208), (16, 7, NOBODY), (32, 0, NOBODY))
    assert [moved_ids(name, before, moved) for name in ACLS] == [after, after]
    assert moved_ids("user.acl", before, moved) == before


def test_root_that_capabilities_are_for_is_moved() -> None:
    assert moved_ids(CAPABILITY, pack("<6I", 0x03000001, 1, 2, 3, 4, 5), moved) == pack(
        "<6I", 0x03000001, 1, 2, 3, 4, 105
    )


def test_capabilities_for_every_root_stay() -> None:
    value = pack("<5I", 0x02000001, 1, 2, 3, 4)
    assert moved_ids(CAPABILITY, value, moved) == value


@given(st.sampled_from([*ACLS, CAPABILITY, "user.x"]), st.binary(max_size=64))
def test_no_value_changes_its_length(name: str, value: bytes) -> None:
    assert len(moved_ids(name, value, lambda user, group: (group, user))) == len(value)
