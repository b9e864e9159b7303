"""Which gRPC code a failure becomes: the table knows each name once, and each name is one of the code."""

from __future__ import annotations

import ast

import grpc
from hypothesis import given
from hypothesis import strategies as st

from kybernate.agent.service.errors import CODES, DEFAULT, LONGEST, code_of, details_of
from kybernate.messages.agent_pb2 import Error
from kybernate.node.failure import Claimed, Failure, Missing
from tests.documentation import modules


def failures() -> set[str]:
    """Return the names of all failures that the platform defines."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for path, tree in modules().items()
        if "kybernate_shim" not in path.parts
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    known = {"Failure"}
    while more := {name for name, above in bases.items() if above & known} - known:
        known |= more
    return known


def test_every_name_of_the_table_is_a_failure_once() -> None:
    names = [name for row in CODES.values() for name in row]
    assert len(names) == len(set(names))
    assert set(names) - failures() == set()


def test_failure_has_the_code_of_its_class_or_its_nearest_parent() -> None:
    class Particular(Missing):
        pass

    class Other(Failure):
        pass

    assert code_of(Particular("x")) is grpc.StatusCode.NOT_FOUND
    assert code_of(Claimed("x")) is grpc.StatusCode.ALREADY_EXISTS
    assert code_of(Other("x")) is DEFAULT is grpc.StatusCode.FAILED_PRECONDITION


@given(st.text(alphabet=st.characters(codec="utf-8")), st.text(max_size=20), st.text(max_size=20))
def test_details_are_what_the_failure_says(message: str, state: str, advice: str) -> None:
    found = Error.FromString(details_of(Failure(message, state=state, advice=advice)))
    assert (found.type, found.message) == ("Failure", message[:LONGEST])
    assert (found.state, found.advice) == (state, advice)


def test_details_of_any_length_fit_into_the_metadata() -> None:
    long = "x" * 1_000_000
    assert len(details_of(Failure(long, state=long, advice=long))) < 8000
