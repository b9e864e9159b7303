"""One thread of another process that is followed through its own system calls, and whose arguments may be changed.

tracee.py makes a thread execute calls; here it executes calls of its own.
Source: ptrace(2), "Syscall-stops".
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kybernate_shim.linux.ptrace import requests
from kybernate_shim.linux.ptrace.requests import INTERRUPT, SYSCALL, CallInfo, ptrace
from kybernate_shim.linux.ptrace.tracee import AT_ENTRY, CALL_STOP, TargetEnded, Tracee, delivered


class Changed(NamedTuple):
    """A call whose arguments differ from the thread's own: where it is, and both values, by index."""

    place: tuple[int, int]
    arguments: Mapping[int, int]
    own: Mapping[int, int]


class FollowedTracee(Tracee):
    """A thread that stops at the entry and at the exit of its own calls."""

    _seen: CallInfo | None = None  # the last of its own calls that was looked at

    def go_to_call(self) -> None:
        """Resume the thread to the entry or the exit of its next call; `at_call` reports when it has stopped there."""
        self._going(lambda: self._resume(SYSCALL, 0))

    def at_call(self) -> bool:
        """Return whether the thread has stopped at a call; its signals are delivered. Raises TargetEnded."""
        while (status := self._poll()) is not None:
            if os.WSTOPSIG(status) == CALL_STOP:
                return True
            number = delivered(status)
            self._going(lambda: self._resume(SYSCALL, number))  # noqa: B023  # called immediately
        return False

    def entered(self) -> tuple[int, tuple[int, ...]] | None:
        """Return number and arguments of the call at whose entry the thread is, None at an exit.

        The number is -1 for a call of another architecture, such as one of 32 bits.
        """
        info = self._seen = self._call_info()
        if info.stop != AT_ENTRY:
            return None
        number = info.words[0] if info.architecture == self._abi.architecture else -1
        return number, tuple(info.words[1:7])

    def returned(self) -> int:
        """Return the result of the call at whose exit the thread is; negative is -errno."""
        return ctypes.c_int64(self._call_info().words[0]).value

    def call_here(self, number: int, arguments: Sequence[int], deadline: float) -> int:
        """Do as `call` at the exit of one of the thread's own calls, with the instruction of that call."""
        try:
            address = self._registers()[self._abi.pc] - len(self._abi.instruction)
        except OSError as error:
            raise self._translated(error) from error
        return self.call(address, number, arguments, deadline)

    def change_arguments(self, changes: Mapping[int, int]) -> Changed:
        """Change arguments, by their index, of the call that `entered` has returned.

        They have to be put back at the call's exit: a program expects all but the result to be unchanged.
        Raises TargetEnded where the thread has left that call: a program that is replaced by execve(2) may get its
        thread id.
        """
        try:
            info = requests.call_info(self.tid)
            if self._seen is None or _identity(info) != _identity(self._seen):
                raise TargetEnded(f"thread {self.tid} is no longer in its system call")
            registers = self._registers()
            own = {index: registers[self._abi.arguments[index]] for index in changes}
            values = {index: value % 2**64 for index, value in changes.items()}
            self._set_arguments(registers, values)
        except OSError as error:
            raise self._translated(error) from error
        return Changed(info.place, values, own)

    def put_back(self, changed: Changed) -> bool:
        """Put the own arguments back at the exit of a changed call; return False where the thread is not there."""
        try:
            registers = self._registers()
            found = {index: registers[self._abi.arguments[index]] for index in changed.arguments}
            if requests.call_info(self.tid).place != changed.place or found != changed.arguments:
                return False
            self._set_arguments(registers, changed.own)
        except OSError as error:
            raise self._translated(error) from error
        return True

    def _set_arguments(self, registers: list[int], values: Mapping[int, int]) -> None:
        for index, value in values.items():
            registers[self._abi.arguments[index]] = value
        self._set_registers(registers)

    def leave(self) -> None:
        """Detach a thread that is stopped at a call or about to be, and wait for one that is blocked in the kernel."""
        if self._own is not None:  # a call of ours has not come to its end
            self.detach()
            return
        number = 0
        try:
            if self._running:
                ptrace(INTERRUPT, self.tid)
                status = self._await_stop(math.inf)
                number = 0 if os.WSTOPSIG(status) == CALL_STOP else delivered(status)
        except TargetEnded:
            return
        except OSError as error:
            if error.errno != errno.ESRCH:
                raise
        self._detach(number)

    def _going(self, resume: Callable[[], None]) -> None:
        try:
            resume()
        except OSError as error:
            raise self._translated(error) from error

    def _call_info(self) -> CallInfo:
        try:
            return requests.call_info(self.tid)
        except OSError as error:
            raise self._translated(error) from error


def _identity(info: CallInfo) -> tuple[int, tuple[int, int], tuple[int, ...]]:
    return info.stop, info.place, info.call
