"""A program that moves memory in a thread which is named like the driver's, while another of its threads computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.fakes.memory_process import MemoryProcess

# What talks to us from then on is another thread than the first.
TAKE_OVER = (
    "(lambda thread: (thread.start(), thread.join()))(threading.Thread(target="
    "lambda: [libc.prctl(15, b'cuda00001400006'), print(repr('taken over'), flush=True)]"
    " + [print(repr(eval(line, globals())), flush=True) for line in iter(sys.stdin.readline, '')]))"
)
# Computes for hours without the interpreter's lock: who holds that when it is stopped also stops the one that talks.
COMPUTE = "(lambda thread: (thread.start(), thread.native_id)[1])(threading.Thread(daemon=True, target={target}))"
TARGET = "lambda: hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"


class Actor(MemoryProcess):
    """A program whose talking thread has a name like the driver's, and that computes in another one."""

    def __init__(self) -> None:
        super().__init__()
        self._computing: int = self.ask(COMPUTE.format(target=TARGET))
        assert self.ask(TAKE_OVER) == "taken over"
        assert eventually(lambda: self._state(self.pid) == "S")  # the first thread waits for the other one

    def computes(self) -> bool:
        before = self._spent()
        return eventually(lambda: self._spent() > before)

    def stands_still(self) -> bool:
        before = self._spent()
        time.sleep(0.1)
        return self._spent() == before and self._state(self._computing) == "t"

    def _spent(self) -> int:
        """Return what the computing thread has had of a CPU, in nanoseconds."""
        return int(Path(f"/proc/{self.pid}/task/{self._computing}/schedstat").read_text().split()[0])

    def _state(self, tid: int) -> str:
        return Path(f"/proc/{self.pid}/task/{tid}/stat").read_text().rpartition(")")[2].split()[0]


def eventually(look: Callable[[], bool], *, seconds: float = 20) -> bool:
    """Look until it is true, or for `seconds`."""
    until = time.monotonic() + seconds
    while not (seen := look()) and time.monotonic() < until:
        time.sleep(0.005)
    return seen
