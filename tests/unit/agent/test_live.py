"""What the agent says of its own settings, and what other parts get of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kybernate.agent.live import hooks_of, limits_of, own_findings
from kybernate.agent.settings import LiveSettings, OperationLimits, Settings, Webhook
from kybernate.messages.agent_pb2 import Event
from kybernate.node.failure import Failure


def test_limits_are_those_of_the_settings() -> None:
    found = limits_of(OperationLimits(running=3, per_gpu=4, per_disk=5, deadline=6.0))
    assert (found.running, found.copies_per_gpu, found.copies_per_disk, found.deadline) == (3, 4, 5, 6.0)


def test_webhooks_have_the_secret_of_the_file(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"secret\n")
    urls = ("https://a.example/", "http://b.example/")
    hooks = hooks_of(Webhook(urls, key, "warning"))
    assert [(one.url, one.secret, one.level) for one in hooks] == [(url, b"secret", "warning") for url in urls]
    assert hooks_of(Webhook((), tmp_path / "none")) == ()


def test_webhooks_get_the_types_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('[webhooks]\nurls = ["https://a.example/"]\ntypes = ["operation.*", "containerd.lost"]')
    (hook,) = hooks_of(Settings.load(file).webhooks)
    types = ("operation.failed", "operation.", "operations.failed", "containerd.lost", "containerd.found")
    assert [type for type in types if hook.wants(Event(type=type, level="info"))] == [*types[:2], types[3]]
    file.write_text('[webhooks]\nurls = ["https://a.example/"]')
    (hook,) = hooks_of(Settings.load(file).webhooks)
    assert all(hook.wants(Event(type=type, level="info")) for type in types)


@pytest.mark.parametrize("content", [None, b"", b" \n"])
def test_webhooks_without_their_secret_are_not_posted(tmp_path: Path, content: bytes | None) -> None:
    key = tmp_path / "key"
    if content is not None:
        key.write_bytes(content)
    with pytest.raises(Failure, match=str(key)):
        hooks_of(Webhook(("https://a.example/",), key))


def test_findings_name_what_is_wrong_and_what_waits(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    live = LiveSettings.load(file)
    assert list(own_findings(live)) == []
    file.write_text('nonsense = 1\nsocket = "/other"')
    live.reload()
    waiting, unknown = own_findings(live)
    assert "socket" in waiting.message
    assert "unknown key nonsense" in unknown.message
    file.write_text("socket = 1")
    live.reload()
    assert [one.level for one in own_findings(live)] == ["error", "warning", "warning"]
