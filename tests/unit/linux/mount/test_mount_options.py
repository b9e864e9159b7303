"""Option words: flags, propagation and data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.linux.mount.options import FLAGS, PROPAGATION, parse_options

RDONLY, NOSUID, NODEV, NOEXEC, BIND, REC = 1, 2, 4, 8, 4096, 16384
DATA = st.sampled_from(["index=off", "userxattr", "upperdir=/u", "workdir=/w", "lowerdir=/a:/b", "size=1m", "mode=755"])


def test_overlay_options_as_containerd_sends_them() -> None:
    options = parse_options(["index=off", "workdir=/w", "upperdir=/u", "lowerdir=/a:/b"])
    assert options.flags == 0
    assert options.data == ("index=off", "workdir=/w", "upperdir=/u", "lowerdir=/a:/b")


def test_recursive_read_only_bind_has_no_data() -> None:
    assert parse_options(["rbind", "ro"]) == parse_options(["ro", "rbind"])
    assert parse_options(["rbind", "ro"]).flags == BIND | REC | RDONLY
    assert parse_options(["rbind", "ro"]).data == ()


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["ro", "rw"], 0),
        (["rw", "ro"], RDONLY),
        (["nosuid", "nodev", "noexec"], NOSUID | NODEV | NOEXEC),
        (["nosuid", "nodev", "suid"], NODEV),
        (["sync", "async"], 0),
        (["noatime", "atime"], 0),
        (["relatime"], 1 << 21),
        (["strictatime", "norelatime"], 1 << 24),
        (["dirsync", "mand", "nomand", "defaults", ""], 128),
        (["bind", "remount"], BIND | 32),
    ],
)
def test_last_word_wins(words: list[str], flags: int) -> None:
    assert parse_options(words).flags == flags
    assert parse_options(words).data == ()


def test_propagation_words_are_calls_of_their_own() -> None:
    options = parse_options(["bind", "rprivate", "shared"])
    assert options.flags == BIND
    assert options.propagation == (1 << 18 | REC, 1 << 20)


def test_loop_and_id_maps_are_not_data() -> None:
    options = parse_options(["loop", "uidmap=0:1000:65536", "gidmap=0:2000:1,1:3000:9", "discard"])
    assert options.loop
    assert options.idmapped
    assert (options.uidmap, options.gidmap) == ("0:1000:65536", "0:2000:1,1:3000:9")
    assert options.data == ("discard",)


def test_one_id_map_alone_maps_nothing() -> None:
    assert not parse_options(["uidmap=0:1000:1"]).idmapped


@given(st.lists(st.one_of(st.sampled_from([*FLAGS, *PROPAGATION]), DATA)))
def test_every_word_ends_in_exactly_one_place(words: list[str]) -> None:
    options = parse_options(words)
    assert list(options.data) == [word for word in words if word not in FLAGS and word not in PROPAGATION]
    assert list(options.propagation) == [PROPAGATION[word] for word in words if word in PROPAGATION]
    assert parse_options([*words, "ro"]).flags & RDONLY
    assert not parse_options([*words, "rw"]).flags & RDONLY
    assert options.flags == parse_options([word for word in words if word in FLAGS]).flags
