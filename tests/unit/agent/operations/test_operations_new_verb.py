"""The recipe of docs/development.md: a new verb is a module and a line in the list; the rest is derived from it.

It is added to a copy of the package, under the request of an existing call, since messages are generated.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import kybernate

ROOT = Path(kybernate.__file__).parents[1]
MODULE = '''"""Greet: the container's name, as a result."""

from __future__ import annotations

from dataclasses import dataclass

from kybernate.messages import agent_pb2 as wire
from kybernate.verbs.attempt import Attempt
from kybernate.verbs.model import Result, Target
from kybernate.verbs.node import Node
from kybernate.verbs.verb import Verb


@dataclass(frozen=True)
class Greet(Verb):
    """`name` is whom it greets."""

    verb = "greet"
    call = "Operations/Greet"
    request = wire.GetContainerRequest

    name: str

    def resolve(self, node: Node, id: str) -> Target:
        return Target(title=self.name)

    async def execute(self, attempt: Attempt) -> Result:
        attempt.step("greet")
        return Result(path=f"hello {self.name}")
'''
RUN = '''
import asyncio
from pathlib import Path

from kybernate.agent.access.caller import CALLER, Caller, Role
from kybernate.agent.access.roles import RULES, permits
from kybernate.agent.journal import Journal
from kybernate.agent.operations.engine import Engine
from kybernate.agent.operations.execute import NodeExecutor
from kybernate.agent.operations.store import SCHEMA
from kybernate.agent.service.operations import Operations, with_verbs
from kybernate.messages import agent_pb2 as wire
from kybernate.verbs import here
from kybernate.verbs.greet import Greet
from kybernate.verbs.node import Node


class Events:
    async def record(self, *arguments, **fields):
        return None


class Request:
    """What protoc would generate: the fields of the verb, and its options."""
    name, options = "world", wire.Options(idempotency_key="once")


from kybernate.agent.operations import messages
messages.BY_REQUEST[Request] = Greet


async def main():
    journal = Journal(Path("journal.db"), SCHEMA)
    engine = Engine(journal, NodeExecutor(Node("")), events=Events())
    running = asyncio.create_task(engine.run())
    CALLER.set(Caller(Role.OPERATOR, uid=0, pid=1))
    begun = await with_verbs(Operations)(engine).Greet(Request(), None)
    *_, last = [one async for one in engine.watch(begun.id)]
    running.cancel()
    await asyncio.wait({running})
    journal.close()
    return last


method = "/kybernate.node.v1.Operations/Greet"
assert permits(Role.OPERATOR, method) and not permits(Role.READER, method) and RULES[method].verb == "greet"
last = asyncio.run(main())
assert (last.verb, last.state, last.result.path) == ("greet", "succeeded", "hello world"), last
alone = here.carried_out(here.resolved(Greet("you"), ""), "", lambda report: None)
assert alone.result.path == "hello you", alone
print("greeted")
'''


def test_verb_of_one_module_and_one_line_is_served_permitted_journalled_and_run(tmp_path: Path) -> None:
    for package in ("kybernate", "kybernate_shim"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "*.pyi"))
    (tmp_path / "kybernate/verbs/greet.py").write_text(MODULE)
    every = tmp_path / "kybernate/verbs/every.py"
    text = every.read_text()
    imported = "from kybernate.verbs.importing import Import\n"
    assert imported in text
    assert "Wake, Sleep," in text
    text = text.replace(imported, "from kybernate.verbs.greet import Greet\n" + imported)
    every.write_text(text.replace("Wake, Sleep,", "Wake, Sleep, Greet,"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "greeted\n", done.stderr
