"""Kinds of descriptors that CRIU cannot dump, or brings back as something else, each with what to do about it.

Of the first, CRIU says a number only when the container is frozen. Of the second it says nothing: an eventfd that is a
semaphore comes back as a counter, since the kernel has no call that would make one of the other.
Sources: CRIU's files.c, eventfd.c and pipes.c of versions 4.1 and 4.2; proc(5), /proc/PID/fdinfo.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kybernate_shim.linux.held_files import HeldFile
from kybernate_shim.linux.kernel_text import text_of
from kybernate_shim.linux.process import title_of

EVENTFD: Final = "anon_inode:[eventfd]"
# By the names of the kernel: what it is, and the remedy.
NEVER: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "anon_inode:[io_uring]": ("a ring of io_uring(7)", "let the program use epoll(7) or threads"),
        "anon_inode:[userfaultfd]": ("a userfaultfd(2)", "close it before the checkpoint"),
        "anon_inode:[perf_event]": ("a counter of perf_event_open(2)", "end the profiler before the checkpoint"),
        "anon_inode:bpf-prog": ("a BPF program", "close it before the checkpoint"),
        "anon_inode:bpf_link": ("a link of BPF", "close it before the checkpoint"),
        "anon_inode:seccomp notify": ("a listener of seccomp(2)", "end the supervisor before the checkpoint"),
        "anon_inode:[landlock-ruleset]": ("a ruleset of landlock(7)", "close it once it is in force"),
        "/secretmem (deleted)": ("a memfd_secret(2)", "let the program lock memory (mlock(2)) instead"),
    }
)
SEMAPHORE: Final = "\neventfd-semaphore: 1\n"


def problem_of(held: HeldFile) -> str:
    """Return a sentence about what is held, "" where it can come back. Raises OSError where it is not held any more."""
    if found := NEVER.get(held.name):
        what, remedy = found
        return f"{_holder(held)} {what}, which CRIU cannot dump: {remedy}"
    if held.name == EVENTFD and SEMAPHORE in f"{_fdinfo(held)}\n":
        return (
            f"{_holder(held)} an eventfd(2) with EFD_SEMAPHORE, which CRIU brings back as a plain counter: let the"
            " program use one without that flag"
        )
    if held.name.startswith("pipe:[") and _flags(held) & os.O_DIRECT:
        return f"{_holder(held)} a pipe of packets (O_DIRECT), which CRIU cannot dump: make it without that flag"
    return ""


def _holder(held: HeldFile) -> str:
    return f"{title_of(held.pid)} has as its {held.what}"


def _flags(held: HeldFile) -> int:
    for line in _fdinfo(held).split("\n"):
        if line.startswith("flags:"):
            return int(line.split()[1], 8)
    return 0


def _fdinfo(held: HeldFile) -> str:
    return text_of(held.place.replace("/fd/", "/fdinfo/"))
