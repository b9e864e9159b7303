"""A real PostgreSQL in a suspended container, which `psql` wakes through a TCP port of the proxy."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import users
from tests.contract.registry.postgresql import PROGRAMS, USER
from tests.system import node_agent
from tests.system.checkpoints import PYTHON
from tests.system.ctr import Ctr, eventually
from tests.system.node_agent import NodeAgent
from tests.system.proxy_process import free_port, proxying, wakes

SETTINGS = (
    "listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off", "shared_buffers=16MB", "max_connections=40",
    "dynamic_shared_memory_type=mmap",
)  # fmt: skip


@pytest.fixture
def place() -> Iterator[Path]:
    with node_agent.short_place() as directory:
        yield directory


@pytest.fixture
def agent(place: Path) -> Iterator[NodeAgent]:
    with node_agent.running(place) as running:
        yield running


@contextmanager
def database(ctr: Ctr, place: Path, port: int) -> Iterator[str]:
    """A container with the node's own PostgreSQL, as a user without capabilities, on the node's network."""
    programs = max(PROGRAMS.glob("*/bin"))
    data = place / "data"
    data.mkdir()
    shutil.chown(data, USER, USER)
    words = [programs / "initdb", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync", "-D", data]
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    subprocess.run(words, user=USER, group=USER, extra_groups=(), cwd="/", env=environment, check=True)
    subprocess.run(["chown", "-R", f"{users.UID}:{users.UID}", data], check=True)
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    mounts = [("/usr", "/usr", "rbind:ro"), (str(data), "/data", "rbind:rw")]
    flags = ["--net-host", *users.flags()]
    for source, target, options in mounts:
        flags += ["--mount", f"type=bind,src={source},dst={target},options={options}"]
    options = [word for one in SETTINGS for word in ("-c", one)]
    command = [str(programs / "postgres"), "-D", "/data", "-p", str(port), *options]
    with own.running(*command, id=ctr.new_id("database"), flags=flags) as id:
        eventually(lambda: psql(port, "select 1") == "1", seconds=40)
        yield id


def psql_argv(port: int, *more: str) -> list[str]:
    return ["psql", "-X", "-q", "-A", "-t", "-h", "127.0.0.1", "-p", str(port), "-U", USER, "-d", "postgres", *more]


def psql(port: int, statement: str) -> str:
    """Return what a statement answers, "" where it fails."""
    done = subprocess.run(psql_argv(port, "-c", statement), capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip()


def test_psql_wakes_a_database_and_an_open_connection_keeps_it_awake(ours: Ctr, agent: NodeAgent, place: Path) -> None:
    port, door = free_port(), free_port()
    with database(ours, place, port) as id:
        models = f"database: {{container: {id}, upstream: 'tcp://127.0.0.1:{port}', idle: 300ms}}"
        with proxying(place, agent, f"models: {{{models}}}\ntcp: [{{listen: '127.0.0.1:{door}', to: database}}]\n"):
            eventually(lambda: ours.status(id) == "PAUSED", seconds=40)
            assert psql(door, "create table t (n int); insert into t values (7); select n from t") == "7"
            eventually(lambda: ours.status(id) == "PAUSED", seconds=40)

            before = wakes(agent)
            with ThreadPoolExecutor(8) as clients:
                answers = list(clients.map(lambda number: psql(door, f"select n + {number} from t"), range(16)))
            assert answers == [str(7 + number) for number in range(16)]
            assert wakes(agent) - before <= 16
            eventually(lambda: ours.status(id) == "PAUSED", seconds=40)

            session = subprocess.Popen(
                psql_argv(door),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PAGER": ""},
            )
            assert session.stdin is not None
            assert session.stdout is not None
            try:
                session.stdin.write("begin; update t set n = 8; select n from t;\n")
                session.stdin.flush()
                assert session.stdout.readline() == "8\n"
                for _ in range(3):  # three times what an idle one has, in which nothing must happen
                    assert psql(port, "select pg_sleep(0.4), n from t") == "|7"
                    assert ours.status(id) == "RUNNING"
                out, _ = session.communicate("commit; select n from t;\n", timeout=60)
                assert out == "8\n"
            finally:
                session.kill()
                session.wait()
            eventually(lambda: ours.status(id) == "PAUSED", seconds=40)
            assert psql(door, "select n from t") == "8"
