"""Generate the message modules of all packages from proto/, or check that they are what proto/ says.

The shim's messages are plain; the platform's and the tests' come with gRPC clients, since no shim speaks gRPC. Inside a
.proto file another one is imported under the path of the package that its module lands in, so that the generated
imports hold.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "kybernate_shim/ttrpc": "proto/ttrpc",
    "kybernate_shim/messages": "proto/shim",
    "kybernate/messages": "proto/node",
    "tests/messages": "proto/tests",
}
WITH_GRPC = frozenset({"kybernate/messages", "tests/messages"})
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")

# protoc writes the type `Mapping` without arguments, which mypy --strict refuses even in a stub that is only imported.
STUB_HEAD = b'# mypy: disable-error-code="type-arg"\n'


class GenerationFailed(Exception):
    """protoc refused the files; the message ends with what it printed."""


def main(argv: list[str] | None = None) -> int:
    """Write the modules, or with --check list those that differ; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a module is not up to date")
    arguments = parser.parse_args(argv)
    if arguments.check:
        stale = differences(ROOT)
        sys.stdout.writelines(f"{line}\n" for line in stale)
        return 1 if stale else 0
    sys.stdout.writelines(f"{name}\n" for name in write(ROOT))
    return 0


def write(root: Path) -> list[str]:
    """Bring the modules below `root` up to date; return the paths that were written or removed, relative to `root`.

    An unchanged module is left alone, so that its time stamp and its compiled form stay valid.
    """
    changed = []
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(root, Path(scratch))
        for name, content in sorted(fresh.items()):
            target = root / name
            if not target.exists() or target.read_bytes() != content:
                target.write_bytes(content)
                changed.append(name)
        for name in sorted(present(root) - fresh.keys()):
            (root / name).unlink()
            changed.append(f"{name} (removed)")
    return changed


def differences(root: Path) -> list[str]:
    """Return one line for each module that is missing, left over or not what proto/ says."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(root, Path(scratch))
    old = present(root)
    lines = [f"{name}: missing" for name in fresh.keys() - old]
    lines += [f"{name}: no .proto file for it" for name in old - fresh.keys()]
    lines += [f"{name}: out of date" for name in fresh.keys() & old if (root / name).read_bytes() != fresh[name]]
    return sorted(lines)


def present(root: Path) -> set[str]:
    """Return the paths, relative to `root`, of the generated modules that are there now."""
    return {
        str(path.relative_to(root))
        for package in PACKAGES
        for pattern in GENERATED
        for path in (root / package).glob(pattern)
    }


def generate(root: Path, scratch: Path) -> dict[str, bytes]:
    """Run protoc on every file of `root`/proto into `scratch`; return the modules by their path in the repository.

    Raises GenerationFailed with protoc's own words.
    """
    for package, source in PACKAGES.items():
        texts = {f"{package}/{path.name}": path.read_text() for path in sorted((root / source).glob("*.proto"))}
        if texts:
            protoc(root, [f"--python_out={scratch}", f"--pyi_out={scratch}", *texts])
        services = [name for name, text in texts.items() if re.search(r"^service ", text, re.MULTILINE)]
        if services and package in WITH_GRPC:
            protoc(root, [f"--grpc_python_out={scratch}", f"--mypy_grpc_out={scratch}", *services])
    return {
        str(path.relative_to(scratch)): (STUB_HEAD if path.name.endswith("_pb2.pyi") else b"") + path.read_bytes()
        for pattern in GENERATED
        for path in scratch.rglob(pattern)
    }


def protoc(root: Path, arguments: list[str]) -> None:
    """Run the protoc of grpcio-tools with proto/ mapped to where the modules go.

    The plug-in for gRPC's stubs is the one next to the interpreter, whose folder need not be on PATH.
    Raises GenerationFailed.
    """
    includes = [f"-I{package}={source}" for package, source in PACKAGES.items()]
    plugin = f"--plugin=protoc-gen-mypy_grpc={Path(sys.executable).with_name('protoc-gen-mypy_grpc')}"
    command = [sys.executable, "-m", "grpc_tools.protoc", *includes, plugin, *arguments]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if result.returncode:
        raise GenerationFailed(f"protoc ended with {result.returncode}:\n{result.stderr}")


if __name__ == "__main__":
    sys.exit(main())
