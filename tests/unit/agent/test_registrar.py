"""What the registry keeps of what the agent's operations have found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kybernate.agent.registrar import Registrar, Registry
from kybernate.messages import agent_pb2 as wire
from kybernate_shim.config import Config
from kybernate_shim.trust.keys import signing_key
from tests.fakes.images import write_image


def test_damage_that_a_verification_finds_is_kept_until_the_next_one(tmp_path: Path) -> None:
    root = tmp_path / "images"
    root.mkdir(mode=0o700)
    config = replace(Config(), checkpoint_root=root, key_directory=tmp_path / "keys", audit_log=None)
    write_image(root / "web", signing_key(config), id="1")
    registry, unused = Registry(f"sqlite:///{tmp_path}/registry.db", "node-1"), Any
    registrar = Registrar(registry, unused, lambda: config, unused, changed=lambda: None)  # type: ignore[arg-type]

    def verified(state: wire.OperationState, **error: str) -> tuple[str, str]:
        operation = wire.Operation(verb="verify", state=state, error=wire.Error(**error))
        row = registrar._registered(root / "web", operation)
        assert row is not None
        return row.replicas[0].state, row.replicas[0].reason

    words = "the manifest was changed after it was signed"
    try:
        assert verified(wire.FAILED, type="ImageDamaged", message=words) == ("damaged", words)
        assert registrar._registered(root / "web", None).replicas[0].state == "damaged"  # type: ignore[union-attr]
        assert verified(wire.FAILED, type="Failure", message="no key") == ("damaged", words)
        assert verified(wire.SUCCEEDED) == ("complete", "")
    finally:
        registry.close()
