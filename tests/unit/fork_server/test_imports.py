"""What `start` and `delete` import: every module would be paid for twice per container."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from kybernate_shim import launcher
from kybernate_shim.deleted import leave_answer

ROOT = Path(__file__).parents[3]
LIGHT = {
    "_socket", "posix", "kybernate_shim", "kybernate_shim.__main__", "kybernate_shim.deleted",
    "kybernate_shim.fork_server", "kybernate_shim.fork_server.client", "kybernate_shim.fork_server.place",
}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Not even __future__, which is a file to be found and read.
COUNT = """
import sys
before = set(sys.modules)
sys.path.append({packages!r})
from kybernate_shim import __main__ as program
program.client.socket_path = lambda: "/nonexistent"
try:
    print({call})
except program.client.NoServer:
    pass
print(*sorted(set(sys.modules) - before), sep="\\n", file=sys.stderr)
"""


def imported(call: str) -> set[str]:
    """Return the modules that the program has loaded for `call` beyond those of its interpreter."""
    code = COUNT.format(packages=str(ROOT), call=call)
    done = subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("action", ["start", "delete"])
def test_client_imports_next_to_nothing(action: str) -> None:
    assert imported(f"program.client.ask(['-id', 'c1', {action!r}])") <= LIGHT


def test_delete_of_what_its_daemon_has_deleted_imports_next_to_nothing_and_gives_its_answer(tmp_path: Path) -> None:
    (tmp_path / "address").write_text(f"unix://{tmp_path}/none")
    leave_answer(str(tmp_path), b"\x08\x01")
    argv = ["-id", "c1", "-bundle", str(tmp_path), "delete"]
    assert imported(f"sys.argv.__setitem__(slice(1, None), {argv}) or program.main()") <= LIGHT
    program = tmp_path / launcher.NAME
    program.write_text(launcher.script(sys.executable, ROOT))
    program.chmod(0o755)
    assert subprocess.run([program, *argv], capture_output=True, check=True).stdout == b"\x08\x01"


def test_program_that_is_launched_without_site_finds_its_packages(tmp_path: Path) -> None:
    program = tmp_path / launcher.NAME
    program.write_text(launcher.script(sys.executable, ROOT))
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
