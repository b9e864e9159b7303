"""What is imported, and when: the first container of a node waits for it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kybernate_shim import launcher, native
from kybernate_shim.imports import postpone

ROOT = Path(__file__).parents[3]
WITH_GPUS = "from kybernate_shim import imports; from pathlib import Path; imports.DRIVER = Path('/')"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize("client", [True, False])
def test_program_finds_its_packages_without_site(tmp_path: Path, client: bool) -> None:
    compiled = native.build(native.CLIENT, tmp_path) if client else None
    program = tmp_path / launcher.NAME
    program.write_bytes(launcher.program(sys.executable, ROOT, compiled))
    program.chmod(0o755)
    said = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stdout
    assert said.startswith("containerd-shim-kybernate-v1:\n  Version: ")


def after(code: str, **environ: str) -> set[str]:
    """Return the modules that an interpreter has after `code`, without those that are postponed."""
    loaded = "(name for name, module in sys.modules.items() if getattr(module, '__spec__', None))"
    show = f'import sys; print(*{loaded}, sep="\\n", file=sys.stderr)'
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}; {show}"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env={**os.environ, **environ})
    return set(done.stderr.split())


def test_first_container_of_a_node_waits_for_nothing_that_a_checkpoint_needs() -> None:
    heavy = tuple(f"kybernate_shim.{name}." for name in ("checkpoint", "gpu", "arena", "vram_io"))
    packages = {"kybernate_shim.checkpoint.criu", "kybernate_shim.checkpoint.image"}
    modules = {"checkpoint.criu.claim", "checkpoint.image.requested", "gpu.nccl_safe"}
    light = packages | {f"kybernate_shim.{name}" for name in modules}
    loaded = after("from kybernate_shim.fork_server.server import import_first; import_first()")
    assert {name for name in loaded if name.startswith(heavy)} <= light
    assert not {"pyroute2", "xxhash"} & loaded


def test_cuda_helper_loads_no_console() -> None:
    assert not {"rich", "structlog", "typer", "grpc"} & after("import kybernate_shim.cuda_helper.helper")


def test_daemon_is_complete_before_its_files_may_be_replaced() -> None:
    """What a function imports when it is called must be there by then, or an old daemon would load new code."""
    serving = f"import kybernate_shim.serve; {WITH_GPUS}; imports.import_rest()"
    complete = after(serving)
    operating = "; ".join(f"import {name}" for name in sorted(daemons_imports()))
    assert {name for name in after(f"{serving}; {operating}") if name.startswith("kybernate_shim")} <= complete


def daemons_imports() -> set[str]:
    """Return the modules of ours that functions of those import that a complete daemon has."""
    names: set[str] = set()
    folders = ("task", "checkpoint", "oci", "linux", "ttrpc", "gpu", "arena", "vram_io")
    packages = [ROOT / "kybernate_shim" / name for name in folders]
    for path in (path for package in packages for path in package.rglob("*.py")):
        for function in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, FUNCTIONS)):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kybernate_shim"):
                    names.add(str(node.module))
    return names


def test_no_daemon_has_what_it_never_uses() -> None:
    prepared = "from kybernate_shim.fork_server.server import import_first; import_first()"
    loaded = after(f"{prepared}; from kybernate_shim.imports import import_rest; import_rest()")
    unused = {
        "_hashlib",
        "asyncio.sslproto",
        "bz2",
        "calendar",
        "difflib",
        "locale",
        "lzma",
        "platform",
        "psutil",
        "random",
        "ssl",
        "structlog",
        "sysconfig",
        "tempfile",
        "tokenize",
        "urllib.parse",
        "google.protobuf.text_format",
    }
    gpus = {
        "kybernate_shim.checkpoint.gpu.accelerator",
        "kybernate_shim.gpu.helper_client",
        "kybernate_shim.messages.cuda_pb2",
    }
    assert (unused | gpus) & loaded <= after("pass")
    assert {"shutil", "tarfile", "kybernate_shim.checkpoint.restore"} <= loaded
    assert gpus <= after(f"{prepared}; {WITH_GPUS}; imports.import_rest()")


def test_module_that_is_postponed_is_imported_by_its_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_package").mkdir()
    (tmp_path / "some_package/__init__.py").touch()
    (tmp_path / "some_package/late.py").write_text("import some_package.later\nVALUE = 7\n")
    (tmp_path / "some_package/later.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    postpone("some_package.late")
    from some_package import late  # type: ignore[import-not-found]

    assert not hasattr(late, "__file__")
    assert "some_package.later" not in sys.modules
    assert late.VALUE == 7
    assert {"some_package.late", "some_package.later"} <= sys.modules.keys()
    assert sys.modules["some_package.late"] is not late
    with pytest.raises(AttributeError, match="NO_SUCH_VALUE"):
        late.NO_SUCH_VALUE  # noqa: B018


def test_messages_in_python_do_as_well_as_those_in_c() -> None:
    once = (
        "from kybernate_shim.messages.task_pb2 import StateRequest as S; "
        "assert S.FromString(S(id='c').SerializeToString()).id == 'c'"
    )
    loaded = after(once, PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION="python")
    assert "google.protobuf.text_format" in loaded
