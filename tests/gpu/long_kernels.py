"""Shows what a checkpoint of the driver does to kernels that run for seconds next to other processes on the GPU.

`python3 -m tests.gpu.long_kernels [SECONDS]` needs a real GPU and calls the driver alone: no part of Kybernate. A
program runs one kernel of that many seconds, while another one launches kernels of 5 ms all the time. It prints a line
for each case: the answer to the kernel, after how many seconds, how many kernels the other program has run meanwhile,
and what the kernel's log says of the GPU ("Xid"). Measured with driver 580.159.04 on an H100: once the driver has
restored a process, its contexts are no longer preempted in a kernel. The other program waits for each kernel, and one
that lasts about 5 s is ended by "CTX SWITCH TIMEOUT" (Xid 109), which the program sees as error 719. A context that is
made after the restore is preempted as before.
"""

from __future__ import annotations

import ctypes
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_uint, c_void_p

from tests.gpu.zoo.figures import Wrong
from tests.gpu.zoo.gpu import MIB, Gpu

PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 out, .param .u64 nanoseconds)
{
    .reg .pred %p;
    .reg .b64 %place, %begin, %now, %limit;
    ld.param.u64 %place, [out];
    ld.param.u64 %limit, [nanoseconds];
    cvta.to.global.u64 %place, %place;
    mov.u64 %begin, %globaltimer;
LOOP:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %p, %now, %limit;
    @%p bra LOOP;
    st.global.u64 [%place], %now;
    ret;
}
\0"""
RIVALS_SECONDS = 0.005
START_SECONDS, ANSWER_SECONDS = 60.0, 60.0
LOCK_MS = 20000


class Spinner:
    """Runs kernels of so many seconds; in a second context if told to."""

    def __init__(self) -> None:
        self.gpu = Gpu()
        self._get_ready()

    def _get_ready(self) -> None:
        self._spin = self.gpu.kernel(b"spin", PTX)
        self._memory, self._stream = self.gpu.allocate(MIB), self.gpu.stream()

    def run(self, seconds: float) -> str:
        began = time.monotonic()
        try:
            self.gpu.launch(self._spin, self._memory, int(seconds * 1e9), self._stream)
            self.gpu.wait(self._stream)
        except Wrong as error:
            return f"{error} after {time.monotonic() - began:.1f} s"
        return f"done after {time.monotonic() - began:.1f} s"

    def add_context(self, *, use: bool) -> None:
        context = c_void_p()
        self.gpu("cuCtxCreate_v2", byref(context), c_uint(0), c_int(0))
        if use:
            self._get_ready()
        else:
            self.gpu.enter()


def serve(rival: bool) -> None:
    """Answer the lines of the standard input; as the rival, launch kernels all the while."""
    spinner, count = Spinner(), [0]

    def compete() -> None:
        spinner.gpu.enter()
        while spinner.run(RIVALS_SECONDS).startswith("done"):
            count[0] += 1

    if rival:
        threading.Thread(target=compete, daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["run", seconds]:
                print(spinner.run(float(seconds)), flush=True)
            case ["context", use]:
                spinner.add_context(use=use == "used")
                print("added", flush=True)
            case _:
                print(count[0], flush=True)


class Program:
    """A program of this file in a process of its own, which the driver checkpoints."""

    def __init__(self, role: str) -> None:
        argv = [sys.executable, "-m", "tests.gpu.long_kernels", role]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._driver = ctypes.CDLL("libcuda.so.1")
        assert self._answer(START_SECONDS) == "ready"

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        return self._answer(ANSWER_SECONDS)

    def _answer(self, seconds: float) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        return self._process.stdout.readline().strip() if ready else "no answer"

    def suspend(self) -> None:
        self._verb("Lock", byref((c_uint * 16)(LOCK_MS)))
        self._verb("Checkpoint", None)

    def resume(self) -> None:
        self._verb("Restore", None)
        self._verb("Unlock", None)

    def _verb(self, name: str, arguments: object) -> None:
        result = getattr(self._driver, f"cuCheckpointProcess{name}")(self._process.pid, arguments)
        assert result == 0, f"{name} answered {result}"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def xids() -> list[str]:
    log = subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout
    return [line for line in log.splitlines() if "Xid" in line]


def case(name: str, seconds: float, rival: Program, prepare: Callable[[Program], object]) -> None:
    program = Program("program")
    try:
        prepare(program)
        known, before = len(xids()), rival.ask("count")
        said, after = program.ask(f"run {seconds}"), rival.ask("count")
        ran = int(after) - int(before)
        print(f"{name}: {seconds:g} s: {said}; the other has run {ran}; {' '.join(xids()[known:])[-120:]}", flush=True)
    finally:
        program.end()


def main(seconds: float) -> None:
    assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0

    def cycled(program: Program) -> None:
        program.suspend()
        program.resume()

    def with_context(use: str) -> Callable[[Program], None]:
        def prepare(program: Program) -> None:
            cycled(program)
            program.ask(f"context {use}")

        return prepare

    def only_locked(program: Program) -> None:
        program._verb("Lock", byref((c_uint * 16)(LOCK_MS)))
        program._verb("Unlock", None)

    rival = Program("rival")
    try:
        case("never suspended", seconds, rival, lambda program: None)
        case("locked and unlocked", seconds, rival, only_locked)
        for length in (0.5, 2, 4, seconds):
            case("suspended and resumed", length, rival, cycled)
        case("suspended and resumed, then in a new context", seconds, rival, with_context("used"))
        case("suspended and resumed, then next to a new context", seconds, rival, with_context("unused"))
        rival.suspend()
        known = len(xids())
        alone = Program("program")
        cycled(alone)
        print(f"suspended and resumed, alone: {alone.ask(f'run {seconds}')}; {xids()[known:]}", flush=True)
        alone.end()
        rival.resume()
        case("never suspended, the other was", seconds, rival, lambda program: None)
    finally:
        rival.end()


if __name__ == "__main__":
    if sys.argv[1:] in (["program"], ["rival"]):
        serve(sys.argv[1] == "rival")
    else:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else 12.0)
