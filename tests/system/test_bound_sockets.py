"""UNIX sockets that are bound to paths, and checkpoints without the changed files of the root filesystem.

Whether a socket is refused is compared with what CRIU does in fact.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.system.checkpoints import (
    PYTHON,
    Witness,
    assert_no_image,
    assert_whole,
    counting,
    kybernate,
    refused,
    restored,
)
from tests.system.ctr import Ctr

# Counts, and connects to each of its sockets between two numbers. The arguments are their paths; "@" begins an
# abstract one, and directories are made.
LISTENING = """
import os, socket, sys, time
listening = {}
for path in sys.argv[1:]:
    name = path.replace("@", chr(0))
    if not path.startswith("@"):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    listening[name] = socket.socket(socket.AF_UNIX)
    listening[name].bind(name)
    listening[name].listen()
number = 0
while True:
    for name, server in listening.items():
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(name)
            server.accept()[0].close()
    number += 1
    print(number, flush=True)
    time.sleep(0.05)
"""
NEW = "/tmp/pymp-fresh/listener"


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "image"
    shutil.rmtree(tmp_path, ignore_errors=True)


def listening(ctr: Ctr, *paths: str, log: Path, flags: list[str] | None = None) -> AbstractContextManager[Witness]:
    return counting(ctr, "python3", "-c", LISTENING, *paths, image=PYTHON, log=log, flags=flags or [])


@pytest.mark.parametrize("state", ["RUNNING", "PAUSED"])
def test_socket_in_a_new_directory_is_refused_without_changed_files(ours: Ctr, image: Path, state: str) -> None:
    with listening(ours, NEW, log=image.parent / "log") as witness:
        if state == "PAUSED":
            ours("task", "pause", witness.id)
        said = refused("kybernate", "checkpoint", witness.id, str(image), "--no-rootfs", "--exit")
        assert f"python3[{ours.pid(witness.id)}] has the UNIX socket '{NEW}' open" in said
        assert "Leave --no-rootfs away" in said
        assert_no_image(image)
        assert ours.status(witness.id) == state
        if state == "PAUSED":
            ours("task", "resume", witness.id)
        witness.assert_goes_on()


def test_refused_socket_comes_back_with_the_changed_files(ours: Ctr, image: Path) -> None:
    log = image.parent / "log"
    with listening(ours, NEW, log=log) as witness:
        kybernate("checkpoint", witness.id, str(image), "--exit")
        with restored(ours, image, log=log, container_image=PYTHON) as again:
            again.assert_goes_on()


def test_criu_cannot_bind_the_socket_that_was_let_pass(ours: Ctr, image: Path) -> None:
    log = image.parent / "log"
    with listening(ours, NEW, log=log) as witness:
        kybernate("checkpoint", witness.id, str(image), "--no-rootfs", "--force", "--exit")
    assert_whole(image)
    own = Ctr(ours.runtime, ours.namespace, PYTHON)
    id = ours.new_id("r")
    try:
        said = refused(*own.run_argv(id, "false", flags=["-d", "--annotation", f"kybernate.io/restore-from={image}"]))
        assert "Can't bind" in said
        assert NEW in said
    finally:
        ours.remove(id)


def test_sockets_whose_directories_come_back_are_not_refused(ours: Ctr, image: Path) -> None:
    log, volume = image.parent / "log", image.parent / "volume"
    (volume / "inner").mkdir(parents=True)
    (volume / "inner").chmod(0o777)
    flags = ["--mount", f"type=bind,src={volume},dst=/made/volume,options=rbind:rw"]
    paths = ["/tmp/one", "/dev/shm/new/one", "/made/volume/inner/one", "@kybernate-bound"]
    with listening(ours, *paths, log=log, flags=flags) as witness:
        kybernate("checkpoint", witness.id, str(image), "--no-rootfs", "--exit")
        (volume / "inner/one").unlink()
        with restored(ours, image, log=log, container_image=PYTHON, flags=flags) as again:
            again.assert_goes_on()
