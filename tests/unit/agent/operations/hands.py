"""What an engine does with an executor, one call at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kybernate.agent.operations.execute import NodeExecutor
from kybernate.verbs.model import Arguments, Observation, Operation, Report, Result, State, Target
from kybernate.verbs.node import Node
from tests.unit.cli.conftest import Node as FakeNode
from tests.unit.cli.conftest import node as node

ID = "0001"
IGNORED: Callable[[Report], None] = lambda report: None  # noqa: E731  # a value that is passed on


class Hands:
    """What an engine does with an executor, one call at a time."""

    def __init__(self, fake: FakeNode, **known: Any) -> None:
        self.executor = NodeExecutor(Node(fake.containerd.address, boot="boot 1", **known))

    def resolve(self, arguments: Arguments, id: str = ID) -> Target:
        return asyncio.run(self.executor.resolve(id, arguments))

    def operation(self, arguments: Arguments, id: str = ID) -> Operation:
        target = self.resolve(arguments, id)
        return Operation(id, arguments, target, created=1.0, state=State.RUNNING, boot="boot 1", attempts=1)

    def execute(self, arguments: Arguments) -> Result:
        return self.run(self.operation(arguments))

    def run(self, operation: Operation, heard: Callable[[Report], None] = IGNORED) -> Result:
        return asyncio.run(self._run(operation, heard))

    async def _run(self, operation: Operation, heard: Callable[[Report], None]) -> Result:
        return await self.executor.execute(operation, heard)

    def observe(self, operation: Operation) -> Observation:
        return asyncio.run(self.executor.observe(operation))

    def roll_back(self, operation: Operation) -> str:
        return asyncio.run(self.executor.roll_back(operation))
