"""The option words of a containerd mount, sorted into what each of them means to the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kybernate_shim.linux.mount import syscalls

# word: (flags it clears, flags it sets). Source: mount(8), "filesystem-independent mount options".
FLAGS = {
    "async": (syscalls.MS_SYNCHRONOUS, 0),
    "atime": (syscalls.MS_NOATIME, 0),
    "bind": (0, syscalls.MS_BIND),
    "defaults": (0, 0),
    "dev": (syscalls.MS_NODEV, 0),
    "diratime": (syscalls.MS_NODIRATIME, 0),
    "dirsync": (0, syscalls.MS_DIRSYNC),
    "exec": (syscalls.MS_NOEXEC, 0),
    "mand": (0, syscalls.MS_MANDLOCK),
    "noatime": (0, syscalls.MS_NOATIME),
    "nodev": (0, syscalls.MS_NODEV),
    "nodiratime": (0, syscalls.MS_NODIRATIME),
    "noexec": (0, syscalls.MS_NOEXEC),
    "nomand": (syscalls.MS_MANDLOCK, 0),
    "norelatime": (syscalls.MS_RELATIME, 0),
    "nostrictatime": (syscalls.MS_STRICTATIME, 0),
    "nosuid": (0, syscalls.MS_NOSUID),
    "rbind": (0, syscalls.MS_BIND | syscalls.MS_REC),
    "relatime": (0, syscalls.MS_RELATIME),
    "remount": (0, syscalls.MS_REMOUNT),
    "ro": (0, syscalls.MS_RDONLY),
    "rw": (syscalls.MS_RDONLY, 0),
    "strictatime": (0, syscalls.MS_STRICTATIME),
    "suid": (syscalls.MS_NOSUID, 0),
    "sync": (0, syscalls.MS_SYNCHRONOUS),
}

PROPAGATION = {
    prefix + word: flag | recursive
    for prefix, recursive in (("", 0), ("r", syscalls.MS_REC))
    for word, flag in {
        "private": syscalls.MS_PRIVATE,
        "shared": syscalls.MS_SHARED,
        "slave": syscalls.MS_SLAVE,
        "unbindable": syscalls.MS_UNBINDABLE,
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
    """Sort option words; of contradictory ones the last wins, as with mount(8). An unknown word is data."""
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
