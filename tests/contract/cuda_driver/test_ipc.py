"""CUDA IPC of memory that the arena's library has made: another process with the library opens it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.cuda_driver.test_preload import PRELUDE
from tests.fakes.cuda import Gpus

pytestmark = pytest.mark.root
HANDLE = """
class Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]
def imports():
    found = control_of(os.getpid())
    if found is None:
        return 0
    with found:
        return found.imports()
def read(address, bytes):
    back = ctypes.create_string_buffer(bytes)
    call("cuMemcpyDtoH_v2", back, address, size(bytes))
    return back.raw
"""
OPENS = """
handle, address = Handle.from_buffer_copy(bytes.fromhex(sys.argv[1])), u64()
print(code("cuIpcOpenMemHandle_v2", ref(address), handle, 1), flush=True)
if address.value:
    assert imports() == 1, imports()
    print(read(address, 16).hex(), flush=True)
    call("cuMemcpyHtoD_v2", address, b"from the other..", size(16))
    print("written", flush=True)
    sys.stdin.readline()
    call("cuIpcCloseMemHandle", address)
    assert imports() == 0, imports()
    print("closed", flush=True)
"""
SHARES = """
import subprocess
def opened_by_another(handle):
    argv = [sys.executable, "-c", OTHER, bytes(handle).hex()]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
memory, handle = allocate(4 * MIB), Handle()
call("cuMemcpyHtoD_v2", memory, b"of the first one", size(16))
assert blocks() == [(4, False)]
call("cuIpcGetMemHandle", ref(handle), memory)
assert blocks() == [(4, True)], "it stays out of the arena"
"""


@pytest.fixture
def run(gpus: Gpus, libraries: Path, preload: Path) -> Callable[[str], None]:
    """Run a program with the library, and with the text of another one as OTHER; it fails by an exception."""

    def inside(body: str) -> None:
        environment = {**os.environ, **gpus.environment(libraries), "LD_PRELOAD": str(preload)}
        text = f"{PRELUDE}{HANDLE}OTHER = {PRELUDE + HANDLE + OPENS!r}\n{SHARES}{body}"
        done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr

    return inside


def test_another_process_sees_the_memory_and_counts_as_one_that_has_imported(run: Callable[[str], None]) -> None:
    run("""
others = [opened_by_another(handle) for _ in range(2)]
for other in others:
    assert other.stdout.readline() == "0\\n"
    other.stdout.readline()
    assert other.stdout.readline() == "written\\n"
assert read(memory, 16) == b"from the other.."
for other in others:
    out, _ = other.communicate("\\n", 30)
    assert out == "closed\\n", out
    assert other.returncode == 0
assert keeps(memory, 4 * MIB)
call("cuMemFree_v2", memory)
assert blocks() == []
""")


def test_memory_stays_for_who_has_it_when_its_owner_frees_it(run: Callable[[str], None]) -> None:
    run("""
other = opened_by_another(handle)
assert other.stdout.readline() == "0\\n"
assert bytes.fromhex(other.stdout.readline()) == b"of the first one"
assert other.stdout.readline() == "written\\n"
call("cuMemFree_v2", memory)
out, _ = other.communicate("\\n", 30)
assert (out, other.returncode) == ("closed\\n", 0)
""")


def test_handle_of_what_is_gone_or_forged_is_refused(run: Callable[[str], None]) -> None:
    run("""
call("cuMemFree_v2", memory)
another = allocate(4 * MIB)  # at the same place of the table
forged = Handle.from_buffer_copy(bytes(handle)[:10] + b"????" + bytes(handle)[14:])
for one in (handle, forged):
    out, _ = opened_by_another(one).communicate("\\n", 30)
    assert out == "1\\n", out
""")


def test_children_of_a_fork_have_no_part_in_it(run: Callable[[str], None]) -> None:
    run("""
child = os.fork()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
other = opened_by_another(handle)
lines = [other.stdout.readline() for _ in range(3)]
assert (lines[0], lines[2]) == ("0\\n", "written\\n")
assert other.communicate("\\n", 30)[0] == "closed\\n"
""")
