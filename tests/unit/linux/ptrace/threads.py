"""What the kernel says of threads and memory, and a filter that denies a call."""

from __future__ import annotations

import threading
from pathlib import Path

from kybernate_shim.linux.ptrace.syscall_abi import of_this_machine

MIB = 1 << 20
BLOCKED_CALLS = {  # what each does when a stop interrupts it differs in the kernel
    "sleep": "time.sleep(0.4)",
    "sleep-by-poll": "__import__('select').poll().poll(400)",
    "epoll": "__import__('select').epoll().poll(0.4)",
    "sigtimedwait": "signal.sigtimedwait([signal.SIGUSR2], 0.4)",
}


def deny_madvise() -> str:
    """Python that installs a filter: madvise fails with EPERM, everything else is allowed."""
    abi = of_this_machine()
    assert abi is not None
    program = [(0x20, 0, 0, 0), (0x15, 0, 1, abi.madvise), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
    return (
        f"globals().update(code=b''.join(__import__('struct').pack('=HBBI', *i) for i in {program})), "
        "globals().update(buffer=ctypes.create_string_buffer(code)), "
        "globals().update(prog=__import__('struct').pack('@HxxxxxxP', 4, ctypes.addressof(buffer))), "
        "libc.prctl(38, 1, 0, 0, 0), libc.prctl(22, 2, prog, 0, 0)"
    )


def capable_of_all() -> bool:
    text = Path("/proc/self/status").read_text()
    return bool(int(text.split("CapEff:")[1].split()[0], 16) >> 21 & 1)


def vm_flags(pid: int, address: int) -> list[str]:
    flags: list[str] = []
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if line.startswith(f"{address:x}-"):
            inside = True
        if inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return flags


def thread_names(pid: int) -> dict[int, str]:
    return {
        int(task.name): (task / "comm").read_text().removesuffix("\n") for task in Path(f"/proc/{pid}/task").iterdir()
    }


def state_of(tid: int) -> str:
    return Path(f"/proc/{tid}/stat").read_text().rpartition(")")[2].split()[0]


def is_untraced(tid: int) -> bool:
    return "TracerPid:\t0\n" in Path(f"/proc/{tid}/status").read_text()


def parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def await_state(pid: int, state: str) -> None:
    await_that(lambda: state_of(pid) == state, f"state {state} of {pid}")


def await_that(condition: object, what: str) -> None:
    assert callable(condition)
    ticks = threading.Event()
    for _ in range(2000):
        if condition():
            return
        ticks.wait(0.005)
    raise AssertionError(f"no {what} within 10 s")
