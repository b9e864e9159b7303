"""The list of verbs agrees with what it is about: the services of the .proto file, and the calls of the client."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
from google.protobuf.message import Message

from kybernate.client.verbs import Verbs
from kybernate.messages import agent_pb2 as wire
from kybernate.verbs.every import BY_CALL, VERBS
from kybernate.verbs.verb import Verb


@pytest.mark.parametrize("kind", VERBS.values(), ids=VERBS)
def test_verb_has_the_request_of_its_call_and_that_has_its_fields(kind: type[Verb]) -> None:
    service, method = kind.call.split("/")
    call = wire.DESCRIPTOR.services_by_name[service].methods_by_name[method]
    assert call.input_type is kind.request.DESCRIPTOR
    assert call.output_type is wire.Operation.DESCRIPTOR
    asked = {kind.renamed.get(field.name, field.name) for field in fields(kind)}
    assert asked == set(kind.request.DESCRIPTOR.fields_by_name) - {"options"}


def test_every_call_that_begins_an_operation_is_of_a_verb() -> None:
    begins = {
        f"{service.name}/{method.name}"
        for service in wire.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if "options" in method.input_type.fields_by_name and service.name != "Self"
    }
    assert begins == set(BY_CALL)


def test_client_has_a_method_for_each_verb() -> None:
    sent = []

    class Recorded(Verbs[None]):
        def _begin(self, method: str, request: Message) -> None:
            sent.append((method, type(request)))

    client = Recorded()
    for name, method in inspect.getmembers(client, inspect.ismethod):
        if not name.startswith("_"):
            needed = [one for one in inspect.signature(method).parameters.values() if one.default is one.empty]
            method(*("x" for _ in needed))
    assert dict(sent) == {kind.call: kind.request for kind in VERBS.values()}
    assert len(sent) == len(VERBS)
