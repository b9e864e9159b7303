"""The option words of a containerd mount, sorted into what each of them means to the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kybernate_shim.linux import libc

# word: (flags it clears, flags it sets). Source: mount(8), "filesystem-independent mount options".
FLAGS = {
    "async": (libc.MS_SYNCHRONOUS, 0),
    "atime": (libc.MS_NOATIME, 0),
    "bind": (0, libc.MS_BIND),
    "defaults": (0, 0),
    "dev": (libc.MS_NODEV, 0),
    "diratime": (libc.MS_NODIRATIME, 0),
    "dirsync": (0, libc.MS_DIRSYNC),
    "exec": (libc.MS_NOEXEC, 0),
    "mand": (0, libc.MS_MANDLOCK),
    "noatime": (0, libc.MS_NOATIME),
    "nodev": (0, libc.MS_NODEV),
    "nodiratime": (0, libc.MS_NODIRATIME),
    "noexec": (0, libc.MS_NOEXEC),
    "nomand": (libc.MS_MANDLOCK, 0),
    "norelatime": (libc.MS_RELATIME, 0),
    "nostrictatime": (libc.MS_STRICTATIME, 0),
    "nosuid": (0, libc.MS_NOSUID),
    "rbind": (0, libc.MS_BIND | libc.MS_REC),
    "relatime": (0, libc.MS_RELATIME),
    "remount": (0, libc.MS_REMOUNT),
    "ro": (0, libc.MS_RDONLY),
    "rw": (libc.MS_RDONLY, 0),
    "strictatime": (0, libc.MS_STRICTATIME),
    "suid": (libc.MS_NOSUID, 0),
    "sync": (0, libc.MS_SYNCHRONOUS),
}

PROPAGATION = {
    prefix + word: flag | recursive
    for prefix, recursive in (("", 0), ("r", libc.MS_REC))
    for word, flag in {
        "private": libc.MS_PRIVATE,
        "shared": libc.MS_SHARED,
        "slave": libc.MS_SLAVE,
        "unbindable": libc.MS_UNBINDABLE,
    }.items()
}


@dataclass(frozen=True)
class MountOptions:
    """`flags` and `propagation` are MS_*, `data` is for the filesystem. Id maps read "inside:outside:count,…"."""

    flags: int
    data: tuple[str, ...] = ()
    propagation: tuple[int, ...] = ()
    loop: bool = False
    uidmap: str = ""
    gidmap: str = ""

    @property
    def idmapped(self) -> bool:
        return bool(self.uidmap and self.gidmap)


def parse_options(words: Sequence[str]) -> MountOptions:
    """Sort option words; of contradicting ones the last wins, as with mount(8). An unknown word is data."""
    flags, loop = 0, False
    data: list[str] = []
    propagation: list[int] = []
    maps = {"uidmap": "", "gidmap": ""}
    for word in words:
        key, _, value = word.partition("=")
        if word in FLAGS:
            clears, sets = FLAGS[word]
            flags = flags & ~clears | sets
        elif word in PROPAGATION:
            propagation.append(PROPAGATION[word])
        elif word == "loop":
            loop = True
        elif key in maps:
            maps[key] = value
        elif word:
            data.append(word)
    return MountOptions(flags, tuple(data), tuple(propagation), loop, **maps)
