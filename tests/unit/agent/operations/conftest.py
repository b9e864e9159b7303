"""A node with a container on real sockets, and what executes operations on it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.unit.agent.operations.hands import Hands
from tests.unit.cli.conftest import Node as FakeNode
from tests.unit.cli.conftest import node as node


@pytest.fixture
def hands(node: FakeNode) -> Hands:
    return Hands(node)


@pytest.fixture
def counter(node: FakeNode) -> Any:
    """A container with a shim."""
    node.containerd.add("counter", image="busybox:1")
    node.containerd.add_image("busybox:1")
    shim = node.shim("counter")
    shim.add("counter", pid=os.getpid())
    return shim
