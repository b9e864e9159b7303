"""What is imported, and when: the first container of a node waits for it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from kybernate_shim import launcher, native

ROOT = Path(__file__).parents[3]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize("client", [True, False])
def test_program_finds_its_packages_without_site(tmp_path: Path, client: bool) -> None:
    compiled = native.build(native.CLIENT, tmp_path) if client else None
    program = tmp_path / launcher.NAME
    program.write_bytes(launcher.program(sys.executable, ROOT, compiled))
    program.chmod(0o755)
    said = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stdout
    assert said.startswith("containerd-shim-kybernate-v1:\n  Version: ")


def after(code: str) -> set[str]:
    """Return the modules that an interpreter has after `code`."""
    show = 'import sys; print(*sys.modules, sep="\\n", file=sys.stderr)'
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}; {show}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_first_container_of_a_node_waits_for_nothing_that_a_checkpoint_needs() -> None:
    heavy = ("kybernate_shim.checkpoint.", "kybernate_shim.cuda.")
    light = {"kybernate_shim.checkpoint.claim", "kybernate_shim.checkpoint.requested", "kybernate_shim.cuda.nccl_safe"}
    loaded = after("from kybernate_shim.fork_server.server import import_first; import_first()")
    assert {name for name in loaded if name.startswith(heavy)} <= light
    assert not {"pyroute2", "xxhash"} & loaded


def test_daemon_is_complete_before_its_files_may_be_replaced() -> None:
    """What a function imports when it is called must be there by then, or an old daemon would load new code."""
    serving = "import kybernate_shim.serve; from kybernate_shim.imports import import_rest; import_rest()"
    complete = after(serving)
    operating = "; ".join(f"import {name}" for name in sorted(daemons_imports()))
    assert {name for name in after(f"{serving}; {operating}") if name.startswith("kybernate_shim")} <= complete


def daemons_imports() -> set[str]:
    """Return the modules of ours that functions of those import that a complete daemon has."""
    names: set[str] = set()
    packages = [ROOT / "kybernate_shim" / name for name in ("task", "checkpoint", "oci", "linux", "ttrpc", "cuda")]
    for path in (path for package in packages for path in package.rglob("*.py")):
        if path in (ROOT / "kybernate_shim/cuda/worker.py", ROOT / "kybernate_shim/cuda/helper.py"):
            continue  # programs of their own
        for function in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, FUNCTIONS)):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kybernate_shim"):
                    names.add(str(node.module))
    return names
