"""What runs in the containers: a process that holds random memory, and proves on SIGUSR1 that it is still the same.

Random and of pages that are all different, which saves nothing on them: slices of one block of random bytes that
begin elsewhere each time, because two GiB of fresh ones would take longer than what is measured. The proof goes to a
file in the root filesystem, where it is found from outside, whatever has become of the container's output.
"""

from __future__ import annotations

from pathlib import Path

PROOF = "proof"
SOURCE = f"""
import os, random, signal, sys, zlib

SLICE, SHIFT = 16 << 20, 4099
memory = bytearray(int(sys.argv[1]) << 20)
view = memoryview(memory)
offsets = range(0, len(memory), SLICE)
block = memoryview(random.randbytes(SLICE + len(offsets) * SHIFT))
for number, offset in enumerate(offsets):
    view[offset:offset + SLICE] = block[number * SHIFT:number * SHIFT + SLICE]

def prove(*_):
    with open("/{PROOF}.new", "w") as stream:
        stream.write(f"{{os.getpid()}} {{zlib.crc32(memory)}}")
    os.rename("/{PROOF}.new", "/{PROOF}")

del block
signal.signal(signal.SIGUSR1, prove)
prove()
while True:
    signal.pause()
"""


def command(mib: int) -> list[str]:
    """Return the command of a container that holds `mib` MiB; it has proved itself once when it is ready."""
    return ["python3", "-c", SOURCE, str(mib)]


def proof_file(pid: int) -> Path:
    """Return where the process, by its pid on the host, leaves its proof."""
    return Path(f"/proc/{pid}/root/{PROOF}")
