"""The rules that tools can check, as tests: style, types, and the layers of the architecture."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

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
