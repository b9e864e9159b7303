"""What runs in the containers: a process that holds random memory, and proves on SIGUSR1 that it is still the same.

Random, so that no page is like another one; filled anew for every container. The proof goes to a file in the root
filesystem, where it is found from outside, whatever has become of the container's output.
"""

from __future__ import annotations

from pathlib import Path

PROOF = "proof"
SOURCE = f"""
import os, random, signal, sys, zlib

MIB = 1 << 20
memory = bytearray(int(sys.argv[1]) * MIB)
view, source = memoryview(memory), random.Random()
for offset in range(0, len(memory), MIB):
    view[offset:offset + MIB] = source.randbytes(MIB)

def prove(*_):
    with open("/{PROOF}.new", "w") as stream:
        stream.write(f"{{os.getpid()}} {{zlib.crc32(memory)}}")
    os.rename("/{PROOF}.new", "/{PROOF}")

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
