"""A tenant's programs stand in the way while their container is moved to the disk and to S3, and woken from there.

In every case the checkpoint ends by its deadline, with an image that goes through the tiers and restores from the
store, or with a reason, and the container runs on. No image has anything of the node, and another tenant's container
is moved and woken at the same time.
"""

# ruff: noqa: F811  # pytest finds fixtures by the names of parameters
from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import users
from tests.hostile.tenant import SECRET
from tests.hostile.test_programs import COUNTING, DEADLINE, ROWS, Row, attacking, flags_of
from tests.system.checkpoints import PYTHON, assert_whole, counting, kybernate
from tests.system.ctr import Ctr, eventually, finished
from tests.system.node_agent import NodeAgent
from tests.system.test_tiers import ROOT, agent, goes_on, memory, server, tiers_of  # noqa: F401  # fixtures

CHECKPOINTED = ("forks without end", "files that are renamed, removed and made again without end",
                "sockets with messages under way, and descriptors within them", "many names of one file")  # fmt: skip

OWN = (
    Row(
        "siblings that are killed whenever there are some",
        """
def killing(ready):
    ready()
    while True:
        mine = [child(sleeping) for n in range(3)]
        for each in mine: os.kill(each, signal.SIGKILL)
        for each in mine: os.waitpid(each, 0)
child(killing)
""",
        may=True,
        refusal=".",
    ),
    Row(
        "a directory that changes places with a link to a directory of the node's",
        """
directory("/tmp/exchanged")
def exchanging(ready):
    os.mkdir("one"); open("one/key", "w").write("its own"); os.symlink(os.environ["NODE"], "two"); ready()
    while True: libc.syscall(316, -100, b"one", -100, b"two", 2)
child(exchanging)
""",
        may=True,
        refusal=".",
    ),
    Row(
        "a FIFO in the place of each file",
        """
directory("/tmp/fifos")
def exchanging(ready):
    for n in range(50): open(str(n), "w").write("x"); os.mkfifo("fifo%d" % n)
    ready()
    while True:
        for n in range(50): libc.syscall(316, -100, b"%d" % n, -100, b"fifo%d" % n, 2)
child(exchanging)
""",
        may=True,
        refusal=".",
    ),
    Row(
        "files that it removes and has open",
        """
directory("/tmp/removed")
def removing(ready):
    ready()
    held = []
    while True:
        for n in range(20): held.append(open(str(n), "w+")); held[-1].write("x"); os.unlink(str(n))
        held = held[-40:]
child(removing)
""",
        may=True,
        refusal=".",
    ),
    Row(
        "memory that grows and is given back without end",
        """
def growing(ready):
    ready()
    while True:
        memory = [os.urandom(1 << 20) for n in range(32)]
child(growing)
""",
    ),
)


@pytest.fixture
def names() -> Iterator[list[str]]:
    """Names of images, which are removed in the end."""
    made: list[str] = []
    yield made
    for name in made:
        shutil.rmtree(ROOT / name, ignore_errors=True)


def moved(agent: NodeAgent, ours: Ctr, name: str, tmp_path: Path) -> None:
    """Have an image be in the store alone, and be restored from there."""
    eventually(lambda: agent.registered(name))
    kybernate("demote", name, "--to", "object", timeout=2 * DEADLINE)
    eventually(lambda: tiers_of(agent, name) == {"object"})
    goes_on(ours, name, tmp_path)


@pytest.mark.parametrize("row", [*(row for row in ROWS if row.name in CHECKPOINTED), *OWN], ids=lambda row: row.name)
def test_container_is_as_before_or_comes_back_from_the_store(
    agent: NodeAgent, ours: Ctr, node_key: Path, names: list[str], tmp_path: Path, row: Row
) -> None:
    agent.write(agent.settings + "[tiers.policy]\nenabled = false\n")
    flags = [*flags_of(row, users.UID), "--env", f"NODE={node_key}"]
    with (
        counting(ours, "python3", "-c", f"import os, time\n{COUNTING}", image=PYTHON) as neighbour,
        attacking(ours, row, flags) as one,
        ThreadPoolExecutor(1) as pool,
    ):
        name, other = f"moved-{one.id}", f"moved-{neighbour.id}"
        names += [name, other]
        beside = pool.submit(kybernate, "checkpoint", neighbour.id, other)
        argv = ["kybernate", "checkpoint", one.id, name, "--exit", "--timeout", str(DEADLINE)]
        done = finished(argv, timeout=2 * DEADLINE)
        beside.result()
        said = done.stderr.decode(errors="replace")
        assert "Traceback" not in said
        if done.returncode:
            assert row.refusal, said
            assert re.search(row.refusal, said), said
            assert not (ROOT / name).exists()
            one.assert_goes_on()
        else:
            assert_whole(ROOT / name)
            for file in (ROOT / name).iterdir():
                assert SECRET not in file.read_bytes(), file
            moved(agent, ours, name, tmp_path)
        moved(agent, ours, other, tmp_path)
        neighbour.assert_goes_on()
