"""The preload library inside programs: what it takes over, what it leaves, and that no process notices otherwise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.cuda import Gpus

pytestmark = pytest.mark.root
OLDEST = (2, 17)  # of glibc: what the images of ten years ago have

# Every call must succeed, but those that are asked `code` of.
PRELUDE = """
import ctypes, os, sys
from kybernate_shim.arena.control import BlockState, control_of
MIB = 1 << 20
library = ctypes.CDLL("libcuda.so.1")
u64, size, ref = ctypes.c_uint64, ctypes.c_size_t, ctypes.byref
def code(name, *arguments):
    return getattr(library, name)(*arguments)
def call(name, *arguments):
    assert code(name, *arguments) == 0, name
def blocks():
    found = control_of(os.getpid())
    if found is None:
        return []
    with found:
        return [(it.size // MIB, it.private) for it in found.blocks() if it.state is BlockState.HERE]
class Wanted(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("place", ctypes.c_int), ("id", ctypes.c_int),
                ("win32", ctypes.c_void_p), ("flags", ctypes.c_uint64)]
class Access(ctypes.Structure):
    _fields_ = [("place", ctypes.c_int), ("id", ctypes.c_int), ("flags", ctypes.c_int)]
def allocate(bytes):
    address = u64()
    call("cuMemAlloc_v2", ref(address), size(bytes))
    return address
def keeps(address, bytes):
    out, back = os.urandom(bytes), ctypes.create_string_buffer(bytes)
    call("cuMemcpyHtoD_v2", address, out, size(bytes))
    call("cuMemcpyDtoH_v2", back, address, size(bytes))
    return back.raw == out
context = ctypes.c_void_p()
call("cuInit", 0)
call("cuCtxCreate_v2", ref(context), 0, 0)
"""


@pytest.fixture
def inside(gpus: Gpus, libraries: Path, preload: Path) -> Callable[[str], None]:
    """Run Python that uses the driver with the library preloaded; it fails by an exception."""

    def run(body: str) -> None:
        environment = {**os.environ, **gpus.environment(libraries), "LD_PRELOAD": str(preload)}
        done = subprocess.run([sys.executable, "-c", PRELUDE + body], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return run


BODIES = {
    "large_allocations_are_taken_and_small_ones_left": """
        small, large = allocate(MIB), allocate(2 * MIB + 1)
        assert blocks() == [(4, False)]
        assert keeps(small, MIB) and keeps(large, 2 * MIB + 1)
        assert code("cuMemFree_v2", u64(large.value + 4096)) == 1
        call("cuMemFree_v2", large)
        call("cuMemFree_v2", small)
        assert blocks() == [] and code("cuMemFree_v2", large) == 1
    """,
    "entries_are_used_again": """
        for _ in range(500):
            first, second = allocate(2 * MIB), allocate(4 * MIB)
            call("cuMemFree_v2", first)
            call("cuMemFree_v2", second)
        with control_of(os.getpid()) as control:
            assert control._word(40) == 2
    """,
    "addresses_of_freed_memory_are_used_again": """
        first, second = allocate(4 * MIB), allocate(6 * MIB)
        call("cuMemFree_v2", first)
        assert code("cuMemFree_v2", first) == 1
        again, other = allocate(4 * MIB), allocate(4 * MIB)
        assert again.value == first.value
        assert other.value not in (first.value, second.value)
        assert keeps(again, 4 * MIB) and keeps(other, 4 * MIB) and keeps(second, 6 * MIB)
        for held in [allocate(2 * MIB * number) for number in range(1, 25)]:  # more sizes than are kept
            call("cuMemFree_v2", held)
        call("cuMemFree_v2", again)
        assert allocate(4 * MIB).value == again.value
    """,
    "what_does_not_fit_on_the_gpu_is_the_drivers_answer": """
        assert code("cuMemAlloc_v2", ref(u64()), size(8 << 30)) == 2
        assert blocks() == []
    """,
    "callers_of_the_drivers_own_lookup_are_caught": """
        found, status = ctypes.c_void_p(), ctypes.c_int()
        call("cuGetProcAddress_v2", b"cuMemAlloc", ref(found), 12000, u64(), ref(status))
        address = u64()
        function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, size)(found.value)
        assert function(ctypes.addressof(address), 2 * MIB) == 0
        assert blocks() == [(2, False)]
        call("cuGetProcAddress_v2", b"cuGetProcAddress", ref(found), 12000, u64(), ref(status))
        assert found.value == ctypes.cast(library.cuGetProcAddress_v2, ctypes.c_void_p).value
    """,
    "missing_functions_stay_missing": """
        try:
            library.cuMulticastBindMem
        except AttributeError:
            pass
        else:
            raise AssertionError("a function of ours without one of the driver's")
    """,
    "memory_that_a_program_maps_itself": """
        handle, address, again = u64(), u64(), u64()
        wanted = Wanted(1, 0, 1, 0)
        call("cuMemCreate", ref(handle), size(2 * MIB), ref(wanted), u64())
        call("cuMemAddressReserve", ref(address), size(8 * MIB), size(), u64(), u64())
        call("cuMemMap", address, size(2 * MIB), size(), handle, u64())
        call("cuMemSetAccess", address, size(2 * MIB), ref(Access(1, 0, 3)), size(1))
        assert blocks() == [(2, False)] and keeps(address, 2 * MIB)
        call("cuMemGetAllocationPropertiesFromHandle", ref(wanted), handle)
        assert wanted.handles == 0
        call("cuMemRetainAllocationHandle", ref(again), ctypes.c_void_p(address.value))
        assert again.value == handle.value
        call("cuMemRelease", handle)
        call("cuMemRelease", again)
        assert keeps(address, 2 * MIB)
        call("cuMemUnmap", address, size(2 * MIB))
        assert blocks() == [] and code("cuMemRelease", handle) == 1
        call("cuMemAddressFree", address, size(8 * MIB))
    """,
    "memory_that_a_program_exports_is_left_to_it": """
        handle, fd = u64(), ctypes.c_int()
        call("cuMemCreate", ref(handle), size(2 * MIB), ref(Wanted(1, 1, 1, 0)), u64())
        call("cuMemExportToShareableHandle", ref(fd), handle, 1, u64())
        assert blocks() == [(2, True)]
        call("cuMemRelease", handle)
        assert blocks() == []
    """,
    "memory_of_others_is_counted_for_as_long_as_it_is_there": """
        def imports():
            with control_of(os.getpid()) as control:
                return control.imports()
        made, fd, theirs, again, address = u64(), ctypes.c_int(), u64(), u64(), u64()
        call("cuMemCreate", ref(made), size(4 * MIB), ref(Wanted(1, 1, 1, 0)), u64())
        call("cuMemExportToShareableHandle", ref(fd), made, 1, u64())
        assert code("cuMemImportFromShareableHandle", ref(theirs), ctypes.c_void_p(1 << 20), 1) == 1
        assert imports() == 0
        call("cuMemImportFromShareableHandle", ref(theirs), ctypes.c_void_p(fd.value), 1)
        assert imports() == 1
        call("cuMemAddressReserve", ref(address), size(8 * MIB), size(), u64(), u64())
        call("cuMemMap", address, size(4 * MIB), size(), theirs, u64())
        assert imports() == 2
        call("cuMemRelease", theirs)
        assert imports() == 1
        call("cuMemRetainAllocationHandle", ref(again), ctypes.c_void_p(address.value))
        assert imports() == 2
        call("cuMemRelease", again)
        call("cuMemSetAccess", address, size(4 * MIB), ref(Access(1, 0, 3)), size(1))
        assert keeps(address, 4 * MIB) and imports() == 1
        call("cuMemUnmap", address, size(4 * MIB))
        call("cuMemRelease", made)
        assert imports() == 0 and blocks() == []
    """,
    "what_is_imported_beyond_count_stays_counted": """
        made, fd, theirs = u64(), ctypes.c_int(), u64()
        call("cuMemCreate", ref(made), size(2 * MIB), ref(Wanted(1, 1, 1, 0)), u64())
        call("cuMemExportToShareableHandle", ref(fd), made, 1, u64())
        addresses = [u64() for _ in range(1100)]
        call("cuMemImportFromShareableHandle", ref(theirs), ctypes.c_void_p(fd.value), 1)
        for address in addresses:
            call("cuMemAddressReserve", ref(address), size(2 * MIB), size(), u64(), u64())
            call("cuMemMap", address, size(2 * MIB), size(), theirs, u64())
        for address in addresses:
            call("cuMemUnmap", address, size(2 * MIB))
        call("cuMemRelease", theirs)
        with control_of(os.getpid()) as control:
            assert control.imports() == 1 + len(addresses) - 1024
    """,
    "memory_that_is_not_writable_somewhere_is_left": """
        handle, address = u64(), u64()
        call("cuMemCreate", ref(handle), size(2 * MIB), ref(Wanted(1, 0, 1, 0)), u64())
        call("cuMemAddressReserve", ref(address), size(2 * MIB), size(), u64(), u64())
        call("cuMemMap", address, size(2 * MIB), size(), handle, u64())
        call("cuMemSetAccess", address, size(2 * MIB), ref(Access(1, 0, 1)), size(1))
        assert blocks() == [(2, True)]
    """,
    "allocations_end_with_their_context": """
        allocate(4 * MIB)
        call("cuCtxDestroy_v2", context)
        assert blocks() == []
    """,
    "forked_child_has_nothing_of_it": """
        memory = allocate(2 * MIB)
        child = os.fork()
        if not child:
            os._exit(not (control_of(os.getpid()) is None and code("cuMemFree_v2", memory) != 0))
        assert os.waitpid(child, 0)[1] == 0
        assert keeps(memory, 2 * MIB) and blocks() == [(2, False)]
    """,
    "memory_that_is_freed_while_it_is_handed_out_is_gone": """
        from kybernate_shim.arena.control import Verb
        call("cuMemFree_v2", allocate(2 * MIB))
        with control_of(os.getpid()) as control:
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(5):
                address = allocate(2 * MIB)
                allocated = len(os.listdir("/proc/self/fd"))
                control.ask(Verb.SHARE, seconds=5, first=0, count=1)
                assert len(os.listdir("/proc/self/fd")) == allocated + 1
                call("cuMemFree_v2", address)
            assert len(os.listdir("/proc/self/fd")) == before
    """,
    "descriptors_are_left_as_they_were": """
        before = os.listdir("/proc/self/fd")
        call("cuMemFree_v2", allocate(2 * MIB))
        assert os.listdir("/proc/self/fd") == before
    """,
}


@pytest.mark.parametrize("what", BODIES)
def test_programs_see_what_they_see_without_it(inside: Callable[[str], None], what: str) -> None:
    inside(textwrap.dedent(BODIES[what]))


def test_library_needs_an_old_glibc_and_nothing_else(preload: Path) -> None:
    read = subprocess.run(["readelf", "-dV", "--wide", preload], capture_output=True, text=True, check=True).stdout
    versions = {tuple(map(int, found.split("."))) for found in re.findall(r"Name: GLIBC_([\d.]+)", read)}
    assert max(versions) <= OLDEST
    needed = set(re.findall(r"NEEDED.*\[(.+?)\.so", read))
    assert needed <= {"libc", "libdl", "libpthread"}


def test_lookups_of_other_libraries_are_made_from_where_they_stand(tmp_path: Path, preload: Path) -> None:
    """RTLD_NEXT means: after the library that asks, whichever library passes the question on."""
    sources = {
        "second": "int probe(void) { return 2; }",
        "first": '#include <dlfcn.h>\nint probe(void) { return 10 + ((int (*)(void))dlsym(RTLD_NEXT, "probe"))(); }',
        "main": "int probe(void); int main(void) { return probe(); }",
    }
    for name, text in sources.items():
        (tmp_path / f"{name}.c").write_text(f"#define _GNU_SOURCE\n{text}\n")
    for name in ("second", "first"):
        shared = ["gcc", "-shared", "-fPIC", "-o", tmp_path / f"lib{name}.so", tmp_path / f"{name}.c", "-ldl"]
        subprocess.run(shared, check=True)
    order = ["-Wl,--no-as-needed", f"-Wl,-rpath,{tmp_path}", f"-L{tmp_path}", "-lfirst", "-lsecond"]
    subprocess.run(["gcc", "-o", tmp_path / "main", tmp_path / "main.c", *order], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(preload)}
    assert subprocess.run([tmp_path / "main"], env=environment, check=False).returncode == 12
