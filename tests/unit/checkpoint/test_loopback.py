"""Which bundles get the hook that switches the loopback device on, and what it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.checkpoint import loopback


def spec(*namespaces: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"linux": {"namespaces": list(namespaces)}, **more}


def test_hook_runs_before_the_users() -> None:
    users = {"path": "/users"}
    document = spec({"type": "network"}, hooks={"createRuntime": [users], "poststop": [users]})
    loopback.add_hook(document)
    added, *others = document["hooks"]["createRuntime"]
    assert (added["path"], others, document["hooks"]["poststop"]) == (sys.executable, [users], [users])
    assert added["args"][0] == sys.executable
    assert Path(added["args"][-1]).samefile(loopback.__file__)


@pytest.mark.parametrize(
    ("document", "own"),
    [
        (spec({"type": "pid"}, {"type": "network"}), True),
        (spec({"type": "network", "path": "/run/netns/pod"}), False),
        (spec({"type": "pid"}), False),
        ({}, False),
        ({"linux": None}, False),
    ],
)
def test_network_is_the_containers_own_without_a_path(document: dict[str, Any], own: bool) -> None:
    assert loopback.is_own(document) == own
