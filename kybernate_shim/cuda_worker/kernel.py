"""Compiles hashing.cu for a GPU: once a node, since the result is kept next to the arena's memory.

This uses NVRTC, which needs no GPU and no CUDA toolkit. It makes machine code, which a driver of the same major version
runs even if NVRTC is the newer of the two. NVRTC runs in a separate process, `python -m
kybernate_shim.cuda_worker.kernel ARCHITECTURE`: it is a compiler of 100 MB, needed once, and may crash.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kybernate_shim.errors import Refused
from kybernate_shim.linux.atomic_write import replace_file

SOURCE = Path(__file__).with_name("hashing.cu")
SECONDS = 60.0


def cached(folder: Path, major: int, minor: int) -> Path:
    """Return where in `folder` the machine code for GPUs of a compute capability is kept."""
    version = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    return folder / f"hashing-{version}-sm_{major}{minor}.cubin"


def machine_code(folder: Path, major: int, minor: int) -> bytes:
    """Return the kernels as a module of CUDA for a compute capability, such as 9 and 0. Raises Refused."""
    path = cached(folder, major, minor)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        pass
    code = _compiled_apart(f"sm_{major}{minor}")
    with suppress(OSError):  # it will be compiled again
        replace_file(path, code)
    return code


def _compiled_apart(architecture: str) -> bytes:
    command = [sys.executable, "-m", __name__, architecture]
    try:
        child = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"the kernels for {architecture} cannot be compiled: {error}") from error
    if child.returncode:
        said = child.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"status {child.returncode}"
        raise Refused(f"the kernels for {architecture} cannot be compiled: {said}")
    return child.stdout


def compiled(architecture: str) -> bytes:
    """Compile for an architecture, such as "sm_90", in this process. Raises Refused."""
    try:
        from cuda.bindings import nvrtc  # here, because it needs an optional package

        return _compile(nvrtc, architecture)
    except Refused:
        raise
    except Exception as error:  # the loader raises its own types, which differ by version
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise Refused(f"NVRTC cannot be loaded ({reason}): install kybernate[gpu]") from error


def _compile(nvrtc: Any, architecture: str) -> bytes:
    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        result, *values = function(*arguments)
        if result:
            raise Refused(f"NVRTC does not compile for {architecture}: {result.name}")
        return values[0] if values else None

    program = call(nvrtc.nvrtcCreateProgram, SOURCE.read_bytes(), SOURCE.name.encode(), 0, [], [])
    try:
        options = [f"--gpu-architecture={architecture}".encode()]
        call(nvrtc.nvrtcCompileProgram, program, len(options), options)
        code = bytearray(call(nvrtc.nvrtcGetCUBINSize, program))
        call(nvrtc.nvrtcGetCUBIN, program, code)
        return bytes(code)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def main() -> int:
    """Write the machine code to the standard output, or the reason for its absence to the standard error."""
    try:
        sys.stdout.buffer.write(compiled(sys.argv[1]))
    except Refused as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
