"""docs/api.md has every call, message and field of the agent's service."""

from __future__ import annotations

from kybernate.messages import agent_pb2, peer_pb2
from tools.api_docs import calls_table, entries, messages_table

FILES = (agent_pb2.DESCRIPTOR, peer_pb2.DESCRIPTOR)
SERVICES = {name: one for file in FILES for name, one in file.services_by_name.items()}
MESSAGES = {name: one for file in FILES for name, one in file.message_types_by_name.items()}
ENUMS = {name: one for file in FILES for name, one in file.enum_types_by_name.items()} | {
    f"{name}.{inner}": one for name, message in MESSAGES.items() for inner, one in message.enum_types_by_name.items()
}


def sections(text: str) -> dict[str, str]:
    return {part.partition("\n")[0].strip(): part for part in text.split("### ")[1:]}


def test_every_call_has_its_row() -> None:
    found = sections(calls_table())
    assert set(found) == set(SERVICES)
    for name, service in SERVICES.items():
        for method in service.methods:
            stream = "stream of " if method.server_streaming else ""
            sent = "stream of " if method.client_streaming else ""
            row = f"| `{method.name}` | {sent}`{method.input_type.name}` | {stream}`{method.output_type.name}` |"
            assert row in found[name]
        assert found[name].count("\n| `") == len(service.methods)


def test_every_field_has_its_row() -> None:
    found = sections(messages_table())
    for name, message in MESSAGES.items():
        fields = [one.name for one in message.fields]
        assert all(f"\n| `{field}` | " in found[name] for field in fields), name
        if fields:
            assert found[name].count("\n| `") == len(fields)
    for name, kind in ENUMS.items():
        assert all(f"| `{value.name}` |" in found[name] for value in kind.values)


def test_enum_of_a_message_has_a_table_of_its_own() -> None:
    text = "message A {\n  // Of A.\n  enum B {\n    C = 0;  // first\n  }\n\n  B b = 1;  // behind\n}\n"
    inner, message = entries(text)
    assert (inner.kind, inner.name, inner.doc, inner.rows) == ("enum", "A.B", "Of A.", [("C = 0;", "first")])
    assert (message.name, message.rows) == ("A", [("B b = 1;", "behind")])


def test_comments_before_and_behind_are_taken() -> None:
    text = "// Of a service.\nservice A {\n  // Before.\n  rpc B(C) returns (D);  // behind\n}\n\nmessage C {}\n"
    service, message = entries(text)
    assert (service.doc, service.rows) == ("Of a service.", [("rpc B(C) returns (D);", "Before. behind")])
    assert (message.name, message.rows) == ("C", [])
