"""How a CPU makes a system call: instruction, registers and numbers, for making one in another process.

Registers are indices of 64-bit words in what PTRACE_GETREGSET(NT_PRSTATUS) gives: the kernel's user_regs_struct on
x86-64, its user_pt_regs on arm64. Sources: asm/ptrace.h of both, syscall(2), the kernel's generic call numbers.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Abi:
    """One CPU architecture.

    `architecture` is what audit and seccomp call it (AUDIT_ARCH_*). `under_way` is the register that holds the number
    of the call in which a thread is, -1 where there is none: the kernel restarts an interrupted call by it, and
    executes the call at whose entry a thread is by it.
    """

    architecture: int
    words: int
    instruction: bytes
    alignment: int  # of instructions, in bytes
    number: int
    arguments: tuple[int, ...]
    result: int
    pc: int
    under_way: int
    branch_state: tuple[int, int]  # register and bits to clear: where an indirect branch would have to land
    madvise: int
    getpid: int
    mmap: int
    munmap: int
    socketpair: int
    recvmsg: int
    close: int
    dup3: int
    eventfd2: int
    mprotect: int
    mremap: int
    process_vm_writev: int

    def prepare(self, registers: list[int], address: int, number: int, arguments: Sequence[int]) -> list[int]:
        """Return `registers` changed so that the instruction at `address` makes the call."""
        changed = list(registers)
        changed[self.pc] = address
        changed[self.number] = number
        for register, value in zip(self.arguments, arguments, strict=False):
            changed[register] = value % 2**64
        if self.under_way >= 0:
            changed[self.under_way] = 2**64 - 1  # not in a call, or the kernel restarts the old one at our address
        register, bits = self.branch_state
        changed[register] &= ~bits
        return changed

    def entered(self, prepared: list[int], number: int) -> tuple[int, ...]:
        """Return what a tracer sees at the entry of the call that `prepare` made ready, as CallInfo.call."""
        behind = prepared[self.pc] + len(self.instruction)
        return (self.architecture, behind, number, *(prepared[register] for register in self.arguments))

    def find(self, code: bytes) -> int:
        """Return the offset of the first system call instruction in `code`, -1 where there is none."""
        offset = code.find(self.instruction)
        while offset >= 0 and offset % self.alignment:
            offset = code.find(self.instruction, offset + 1)
        return offset


X86_64 = Abi(
    architecture=0xC000003E,
    words=27,
    instruction=b"\x0f\x05",
    alignment=1,
    number=10,  # rax
    arguments=(14, 13, 12, 7, 9, 8),  # rdi rsi rdx r10 r8 r9
    result=10,
    pc=16,
    under_way=15,  # orig_rax
    branch_state=(16, 0),
    madvise=28,
    getpid=39,
    mmap=9,
    munmap=11,
    socketpair=53,
    recvmsg=47,
    close=3,
    dup3=292,
    eventfd2=290,
    mprotect=10,
    mremap=25,
    process_vm_writev=311,
)
ARM64 = Abi(
    architecture=0xC00000B7,
    words=34,
    instruction=b"\x01\x00\x00\xd4",  # svc #0
    alignment=4,
    number=8,
    arguments=(0, 1, 2, 3, 4, 5),
    result=0,
    pc=32,
    under_way=-1,  # arm64 sets the registers for the restart before it stops for a tracer
    branch_state=(33, 0b11 << 10),  # pstate.BTYPE
    madvise=233,
    getpid=172,
    mmap=222,
    munmap=215,
    socketpair=199,
    recvmsg=212,
    close=57,
    dup3=24,
    eventfd2=19,
    mprotect=226,
    mremap=216,
    process_vm_writev=271,
)
_BY_MACHINE = {"x86_64": X86_64, "aarch64": ARM64}


def of_this_machine() -> Abi | None:
    """Return the running CPU's convention, None where it is not known."""
    return _BY_MACHINE.get(platform.machine())
