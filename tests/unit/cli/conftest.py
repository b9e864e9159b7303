"""A node for the command line: fake containerd and fake shims on real sockets in a temporary directory."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kybernate.addresses import AGENT_VARIABLE
from kybernate.cli.application import application
from kybernate_shim import address, config
from tests.unit.cli.fake_containerd import FakeContainerd
from tests.unit.cli.fake_shim import FakeShim


@pytest.fixture(autouse=True)
def _own_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line names its agent in the environment of its process, which here is that of all tests."""
    monkeypatch.setenv(AGENT_VARIABLE, "")
    monkeypatch.delenv(AGENT_VARIABLE)


@dataclass
class Node:
    """The programs of a node, and the command line that talks to them."""

    containerd: FakeContainerd
    checkpoints: Path
    shims: list[FakeShim] = field(default_factory=list)

    def shim(self, group: str, *, namespace: str = "default", **options: Any) -> FakeShim:
        shim = FakeShim(self.containerd.address, namespace, group, **options)
        self.shims.append(shim)
        return shim

    def run(self, *argv: str, status: int = 0, input: str = "") -> Result:
        """Run the command line with `input` on stdin, and expect `status`; a traceback is never expected."""
        result = self.attempt(*argv, input=input)
        assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
        assert result.exit_code == status, f"{argv}: {result.exit_code}\n{result.output}{result.exc_info}"
        return result

    def attempt(self, *argv: str, input: str = "") -> Result:
        """Run the command line, and return whatever comes of it."""
        environment = {"CONTAINERD_ADDRESS": self.containerd.address, "CONTAINERD_SNAPSHOTTER": ""}
        return CliRunner(env=environment).invoke(application(argv), argv, input=input)

    def json(self, *argv: str, status: int = 0) -> Any:
        return json.loads(self.run(*argv, "--json", status=status).stdout)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    sockets = Path(tempfile.mkdtemp(prefix="s"))  # pytest's own directories are too deep for a socket's address
    monkeypatch.setattr(address, "SOCKETS", sockets)
    settings = tmp_path / "shim.toml"
    settings.write_text(
        f'checkpoint_root = "{tmp_path}/checkpoints"\nkey_directory = "{tmp_path}/keys"\n'
        f'audit_log = "{tmp_path}/audit.jsonl"\n'
    )
    load: Callable[..., config.Config] = config.Config.load
    monkeypatch.setattr(config.Config, "load", lambda: load(settings))
    fake = FakeContainerd(sockets / "containerd")
    it = Node(fake, tmp_path / "checkpoints")
    yield it
    for shim in it.shims:
        shim.close()
    fake.close()
    shutil.rmtree(sockets)
