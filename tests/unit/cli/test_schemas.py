"""What commands print with `-o json` is what docs/schemas/kybernate.schema.json says, with an agent and without one."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kybernate.client import contexts
from kybernate.messages import agent_pb2 as wire
from kybernate_shim.messages import shim_pb2 as shim_wire
from tests.fakes.agent import FakeAgent
from tests.unit.cli.conftest import Node
from tests.unit.cli.saved_image import save
from tests.unit.cli.test_agent_commands import at, operation

ROOT = Path(__file__).parents[3]
SCHEMA: dict[str, Any] = json.loads((ROOT / "docs" / "schemas" / "kybernate.schema.json").read_text())
STEP = shim_wire.Step(name="lock", seconds=0.5, bytes=7)


def fits(document: object, name: str) -> None:
    """Fail unless a document has the fields of its schema, no others, and their types."""
    jsonschema.validate(document, closed({"$ref": f"#/$defs/{name}", "$defs": SCHEMA["$defs"]}))


def closed(schema: Any) -> Any:
    """Return a schema that allows no field which it does not name: readers may meet new ones, this test must not."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    return {**made, "additionalProperties": False} if "properties" in schema and "required" in schema else made


def test_schemas_are_valid_and_fields_are_required() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for one in SCHEMA["$defs"].values():
        assert one.get("required", []) == list(one.get("properties", {}))


@pytest.mark.parametrize(
    ("name", "message"), [("operation", wire.Operation), ("seat", wire.Seat), ("event", wire.Event)]
)
def test_schema_has_each_field_of_what_is_printed_as_the_agent_sends_it(name: str, message: Any) -> None:
    properties = SCHEMA["$defs"][name]["properties"]
    assert set(properties) == set(message.DESCRIPTOR.fields_by_name)
    for field in message.DESCRIPTOR.fields:
        inner = next((one for one in properties[field.name].get("anyOf", ()) if "properties" in one), None)
        if inner is not None:
            assert set(inner["properties"]) == set(field.message_type.fields_by_name)


def test_manual_lists_each_document() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "docs" / "output.md").read_text(), re.MULTILINE))
    named = {name: one["description"] for name, one in SCHEMA["$defs"].items() if name not in ("time", "step", "arena")}
    assert {name: rows.get(name, "").replace("`", "") for name in named} == named


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAgent]:
    directory = Path(tempfile.mkdtemp(prefix="a"))
    agent = FakeAgent(directory / "agent.sock")
    monkeypatch.setenv("KYBERNATE_AGENT", str(agent.socket))
    yield agent
    agent.stop()
    shutil.rmtree(directory)


def done(verb: str, **result: Any) -> list[wire.Operation]:
    step = wire.Step(name="dump", seconds=0.5, bytes=7)
    return [operation("op-9", wire.SUCCEEDED, verb=verb, steps=[step], result=wire.Result(**result))]


def test_documents_of_the_agent(node: Node, agent: FakeAgent) -> None:
    agent.containers = [wire.Container(namespace="k8s.io", id="c1", title="c1", state="RUNNING", arena_bytes=5)]
    agent.images = [
        wire.Image(id="1", name="one", created=at(1), source=wire.Source(pod="p"), replicas=[wire.Replica(tier="ram")])
    ]
    error = wire.Error(type="DumpFailed", message="CRIU failed")
    progress = wire.Progress(step="dump", done_bytes=1 << 60)
    agent.push(operation("01", wire.FAILED, error=error, progress=progress))
    agent.changes = [wire.Change(revision=1, event=wire.Event(id=1, time=at(2), type="a.done", fields={"a": "b"}))]
    for words, name in (
        (("ps",), "container"), (("images",), "image"), (("ops",), "operation"), (("events",), "event"),
    ):  # fmt: skip
        listed = node.json(*words)
        assert listed
        for one in listed:
            fits(one, name)
        assert yaml.safe_load(node.run(*words, "-o", "yaml").stdout) == listed
    fits(node.json("ops", "01"), "operation")
    fits(node.json("label", "one", "a=b"), "image")
    fits(node.json("version"), "version")


@pytest.mark.parametrize(
    ("words", "verb", "name"),
    [
        (("suspend", "c1"), "suspend", "suspended"), (("resume", "c1"), "resume", "suspended"),
        (("checkpoint", "c1"), "checkpoint", "checkpointed"), (("restore", "i", "-d"), "restore", "restored"),
        (("swap", "a", "b"), "swap", "swapped"),
    ],
)  # fmt: skip
def test_verbs_of_the_agent(node: Node, agent: FakeAgent, words: tuple[str, ...], verb: str, name: str) -> None:
    agent.script = lambda id: done(verb, path="/i", bytes=1, vram_bytes=2, pid=3)
    fits(node.json(*words), name)


def test_documents_without_an_agent(node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KYBERNATE_AGENT", "none")
    node.containerd.add("trainer")
    shim = node.shim("trainer")
    shim.add("trainer")
    shim.answers["Suspend"] = shim_wire.SuspendResponse(vram_bytes=5, steps=[STEP])
    shim.answers["Resume"] = shim_wire.ResumeResponse(vram_bytes=5, steps=[STEP])
    save(node.checkpoints / "one")
    fits(node.json("ps")[0], "container")
    fits(node.json("status", "trainer"), "container")
    fits(node.json("suspend", "trainer"), "suspended")
    fits(node.json("resume", "trainer"), "suspended")
    fits(node.json("images")[0], "image")
    fits(node.json("version"), "version")
    fits(node.json("keys", "rotate") and node.json("keys", "list")[0], "key")
    monkeypatch.setattr(contexts, "SYSTEM", tmp_path / "client.toml")
    (tmp_path / "client.toml").write_text('[contexts.a]\naddress = "/a.sock"\n')
    fits(node.json("context", "ls")[0], "context")
    fits(node.json("context", "show", "a"), "context")


@pytest.mark.parametrize("change", [{"id": 1}, {"state": "SUCCEEDED"}, {"created": "yesterday"}, {"more": 1}])
def test_other_document_would_be_found(node: Node, agent: FakeAgent, change: dict[str, object]) -> None:
    agent.push(operation("01", wire.SUCCEEDED))
    with pytest.raises(jsonschema.ValidationError):
        fits({**node.json("ops", "01"), **change}, "operation")
