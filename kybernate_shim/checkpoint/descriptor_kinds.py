"""Kinds of descriptors that CRIU cannot dump, or brings back as something else, each with what to do about it.

For the first, CRIU reports only a number, once the container is frozen. For the second it reports nothing: an eventfd
that is a semaphore comes back as a counter, since the kernel has no call that would make one of the other.
Sources: CRIU's files.c, eventfd.c and pipes.c of versions 4.1 and 4.2; proc(5), /proc/PID/fdinfo.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kybernate_shim.checkpoint.socket_kinds import SOCKET, problem_of_socket
from kybernate_shim.linux.held_files import TOO_LONG, HeldFile
from kybernate_shim.linux.kernel_text import plain, text_of
from kybernate_shim.linux.process import title_of
from kybernate_shim.linux.statx import status_of

EVENTFD: Final = "anon_inode:[eventfd]"
MEMORY: Final = "/memfd:"
SMALL_PAGES: Final = 1 << 16  # the largest page of a filesystem in memory that has no huge ones
HUGE: Final = "let the program use one without MFD_HUGETLB, and madvise(MADV_HUGEPAGE)"
MISCELLANEOUS, TUNNEL = 10, 200  # numbers of devices: major, and minor of /dev/net/tun
INTERFACE: Final = re.compile(r"^iff:\s*(\S+)$", re.MULTILINE)
TIMERFD: Final = "anon_inode:[timerfd]"
# By the names of the kernel: what it is, and the remedy.
NEVER: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        TOO_LONG: ("a file whose path has more than 4095 bytes", "close it, or shorten the names of its directories"),
        "anon_inode:[io_uring]": ("a ring of io_uring(7)", "let the program use epoll(7) or threads"),
        "anon_inode:[userfaultfd]": ("a userfaultfd(2)", "close it before the checkpoint"),
        "anon_inode:[perf_event]": ("a counter of perf_event_open(2)", "end the profiler before the checkpoint"),
        "anon_inode:bpf-prog": ("a BPF program", "close it before the checkpoint"),
        "anon_inode:bpf-map": ("a BPF map", "close it before the checkpoint"),
        "anon_inode:bpf_link": ("a link of BPF", "close it before the checkpoint"),
        "anon_inode:seccomp notify": ("a listener of seccomp(2)", "end the supervisor before the checkpoint"),
        "anon_inode:[fscontext]": ("a filesystem that is being made (fsopen(2))", "mount it, and close it"),
        "anon_inode:kvm-vm": ("a virtual machine of KVM", "end it before the checkpoint"),
        "anon_inode:[landlock-ruleset]": ("a ruleset of landlock(7)", "close it once it is in force"),
        "/secretmem (deleted)": ("a memfd_secret(2)", "let the program lock memory (mlock(2)) instead"),
    }
)
SEMAPHORE: Final = "\neventfd-semaphore: 1\n"
ALARMS: Final = {f"\nclockid: {number}\n": name for number, name in ((8, "REALTIME"), (9, "BOOTTIME"))}


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
    if held.name == TIMERFD:
        text = f"{_fdinfo(held)}\n"
        for clock in (name for line, name in ALARMS.items() if line in text):
            return (
                f"{_holder(held)} a timerfd of CLOCK_{clock}_ALARM, which wakes the machine and which CRIU cannot dump:"
                f" let the program use CLOCK_{clock}"
            )
    if held.name.startswith("/dev/"):
        return _device(held)
    if held.name.startswith(MEMORY) and os.statvfs(held.place).f_bsize > SMALL_PAGES:
        return f"{_holder(held)} {held.path!a}, a memfd of huge pages, which CRIU cannot dump: {HUGE}"
    if held.name.startswith(SOCKET) and (problem := problem_of_socket(held)):
        return f"{_holder(held)} {problem}"
    if held.name.startswith("pipe:[") and _flags(held) & os.O_DIRECT:
        return f"{_holder(held)} a pipe of packets (O_DIRECT), which CRIU cannot dump: make it without that flag"
    return ""


def _device(held: HeldFile) -> str:
    """Return what is wrong with an open device: of the miscellaneous ones, CRIU knows only that of tunnels."""
    status = status_of(held.place)
    if not stat.S_ISCHR(status.st_mode) or os.major(status.st_rdev) != MISCELLANEOUS:
        return ""
    if os.minor(status.st_rdev) != TUNNEL:
        return f"{held}, a device that CRIU cannot dump: close it before the checkpoint"
    if link := INTERFACE.search(_fdinfo(held)):
        return (
            f"{held}, of the network interface {plain(link[1])!a}, which no restore finds in the new container's"
            " network: end the tunnel before the checkpoint"
        )
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
