"""The rules that tools can check, as tests: style, types, and the layers of the architecture."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.documentation import modules
from tests.exceptions import distinguished, exceptions
from tests.imports import circles, imports, module_name

ROOT = Path(__file__).parents[2]
RULES = {
    "ruff": [sys.executable, "-m", "ruff", "check", "."],
    "ruff-format": [sys.executable, "-m", "ruff", "format", "--check", "."],
    "mypy": [sys.executable, "-m", "mypy"],
    "import-linter": [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
}


@pytest.mark.parametrize("tool", RULES)
def test_code_follows(tool: str) -> None:
    result = subprocess.run(RULES[tool], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{' '.join(RULES[tool])}\n{result.stdout}{result.stderr}"


def classes_below(directory: Path) -> Mapping[str, Sequence[str]]:
    """Return the files of each class, by its name."""
    found = defaultdict(list)
    for path in sorted(directory.rglob("*.py")):
        if not path.stem.endswith("_pb2"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(str(path.relative_to(directory)))
    return found


def test_shim_has_no_two_classes_of_one_name() -> None:
    found = classes_below(ROOT / "kybernate_shim")
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_classes_of_one_name_would_be_found(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text("class One: ...\n")
    assert classes_below(tmp_path) == {"One": ["a.py", "b.py"]}


# What is split into lines there is text of the node's root, of a program of ours, or numbers of the kernel's alone.
SPLITS_LINES = {
    "kybernate/install", "kybernate/node/runtimes.py", "kybernate_shim/checkpoint/criu/config.py",
    "kybernate_shim/checkpoint/script.py",
    "kybernate_shim/checkpoint/image/plaintext_memory.py", "kybernate_shim/fork_server",
    "kybernate_shim/gpu/mover_client.py", "kybernate_shim/linux/cgroup/files.py",
    "kybernate_shim/linux/cgroup/headroom.py",
    "kybernate_shim/linux/cgroup/v1.py", "kybernate_shim/linux/cgroup/v2.py", "kybernate_shim/linux/credentials.py",
    "kybernate_shim/linux/file_pages.py", "kybernate_shim/linux/nvidia_devices.py", "kybernate_shim/oci/runtime.py",
    "kybernate_shim/task/stdio.py", "kybernate_shim/trust/encryption_keys.py",
}  # fmt: skip
# Files of a process that have no name which a program chooses, or are the own process's.
NAMELESS = (
    "oom_score_adj", "children", "loginuid", "limits", "statm", "syscall", "wchan", "uid_map", "/self/", "uptime",
)  # fmt: skip


def lines_with(pattern: str) -> list[tuple[str, str]]:
    """Return the file and the text of each line of the code that has a pattern."""
    found = []
    for package in ("kybernate", "kybernate_shim"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for line in path.read_text().splitlines():
                if re.search(pattern, line):
                    found.append((str(path.relative_to(ROOT)), line.strip()))
    return found


def test_names_in_the_kernels_files_end_no_line() -> None:
    """str.splitlines ends lines at characters that names may have; `linux.kernel_text` does not."""
    used = lines_with(r"\.splitlines\(")
    assert [one for one in used if not one[0].startswith(tuple(SPLITS_LINES))] == []
    assert [place for place in SPLITS_LINES if not any(file.startswith(place) for file, _ in used)] == []


def test_names_in_the_kernels_files_are_any_bytes() -> None:
    read = lines_with(r"/proc/\{.*read_text\(\)")
    assert [line for line in read if not any(name in line[1] for name in NAMELESS)] == []


# Names of exceptions in text: what a call of the agent is answered with.
TABLES = {ROOT / "kybernate/agent/service/errors.py": "CODES", ROOT / "kybernate/cli/exit_codes.py": "NAMES"}
# What a program that uses the client catches, and what the command line's exit status is.
EXPORTED = {"NotFinished", "OperationFailed", "OperationCancelled"}
MOST_EXCEPTIONS = 120
# These say no more than their parents, but for their attributes and advice; the list becomes shorter.
NOT_DISTINGUISHED = {"MountFailed", "TlsMissing"}


def test_each_exception_is_distinguished_by_some_code() -> None:
    """Otherwise its parent, with the same message, says as much."""
    classes = exceptions(modules())
    found = classes - distinguished(modules(), TABLES) - EXPORTED - NOT_DISTINGUISHED
    assert sorted(found) == [], "use the parent, or Refused, Missing, Invalid, Unavailable of kybernate/node/failure.py"
    assert classes >= EXPORTED


def test_exceptions_do_not_become_more() -> None:
    assert len(exceptions(modules())) <= MOST_EXCEPTIONS


def test_exception_that_is_only_raised_is_found(tmp_path: Path) -> None:
    code = "class A(Exception): ...\nclass B(A): ...\nclass C(A): ...\ntry:\n raise B('x')\nexcept C: ...\n"
    trees = {tmp_path: ast.parse(code)}
    assert exceptions(trees) - distinguished(trees, {}) == {"A", "B"}


# Circles of types alone: no module needs the others to be loaded.
CIRCLES_OF_TYPES = {
    "kybernate.agent.assembly",  # a part of the agent knows the others by the agent
    "kybernate.store.objects", "kybernate.verbs.of_shims", "kybernate.verbs.verb",
    "kybernate_shim.task.container", "kybernate_shim.vram_io.thread_pool",
}  # fmt: skip


def test_modules_import_each_other_in_no_circle() -> None:
    """Also not by imports in functions, which hide a circle and do not open it."""
    trees = {module_name(path): tree for path, tree in modules().items()}
    assert circles(imports(trees, for_types=False)) == []
    of_types = circles(imports(trees, for_types=True))
    assert [sorted(one) for one in of_types if not one & CIRCLES_OF_TYPES] == []
    assert len(of_types) == len(CIRCLES_OF_TYPES)


def test_circle_of_imports_is_found() -> None:
    code = {"a": "import b", "b": "def f():\n from c import x", "c": "from typing import TYPE_CHECKING\nimport a"}
    trees = {name: ast.parse(text) for name, text in code.items()}
    assert circles(imports(trees, for_types=False)) == [frozenset("abc")]
    trees["c"] = ast.parse("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n import a")
    assert circles(imports(trees, for_types=False)) == []
    assert circles(imports(trees, for_types=True)) == [frozenset("abc")]
