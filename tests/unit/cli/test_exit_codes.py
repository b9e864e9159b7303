"""Each exit code is that of the failures which docs/output.md names."""

from __future__ import annotations

import ast
from pathlib import Path

import grpc
import pytest

from kybernate.cli.exit_codes import CODES, NAMES, ExitCode, exit_code_of
from kybernate.client.errors import AgentRefused, AgentUnreachable, NotFinished, OperationFailed
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure

ROOT = Path(__file__).parents[3]


def test_names_are_those_of_classes() -> None:
    """A row for a class that was renamed would be silently without effect."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "kybernate").rglob("*.py") if "_pb2" not in path.name]
    known = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    listed = [name for names in NAMES.values() for name in names]
    assert set(listed) - known == set()
    assert len(listed) == len(set(listed))


def test_codes_of_grpc_exist() -> None:
    assert set(CODES) <= {code.name for code in grpc.StatusCode}


@pytest.mark.parametrize(("type", "code"), [(name, code) for code, names in NAMES.items() for name in names])
def test_failure_ends_alike_here_and_through_the_agent(type: str, code: ExitCode) -> None:
    here = _class_of(type)("words")
    operation = wire.Operation(verb="checkpoint", error=wire.Error(type=type, message="words"))
    assert exit_code_of(here) == code
    assert exit_code_of(AgentRefused("words", code="UNKNOWN", type=type)) == code
    assert exit_code_of(OperationFailed(operation)) == code


def _class_of(name: str) -> type[Failure]:
    return type(name, (Failure,), {})


@pytest.mark.parametrize(("grpc_code", "code"), CODES.items())
def test_answer_that_names_no_failure_ends_by_its_code(grpc_code: str, code: ExitCode) -> None:
    assert exit_code_of(AgentRefused("words", code=grpc_code)) == code


def test_derived_class_ends_as_its_parent_and_others_fail() -> None:
    class ImageInUse(_class_of("Other")):  # type: ignore[misc]
        pass

    assert exit_code_of(type("Special", (ImageInUse,), {})("words")) == ExitCode.REFUSED
    assert exit_code_of(_class_of("Unheard")("words")) == ExitCode.FAILED
    assert exit_code_of(AgentRefused("words", code="INTERNAL")) == ExitCode.FAILED
    assert exit_code_of(AgentUnreachable("words")) == ExitCode.UNAVAILABLE
    assert exit_code_of(NotFinished("words")) == ExitCode.TIMED_OUT


def test_table_of_the_manual_has_each_code() -> None:
    text = (ROOT / "docs" / "output.md").read_text()
    assert [code for code in ExitCode if f"| {code.value} |" not in text] == []
