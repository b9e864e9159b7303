"""A filesystem of a tenant's that does not answer keeps no operation beyond its deadline."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.silent_filesystem import silent_filesystem
from tests.hostile.tenant import Tenant
from tests.system.checkpoints import PYTHON, refused
from tests.system.ctr import Ctr, eventually, finished

DEADLINE = "8"
SECONDS = 60  # after which a command that should have ended by its deadline hangs
BINDING = """
import os, socket, time
one = socket.socket(socket.AF_UNIX); one.bind("/silent/socket"); one.listen()
print("ready", flush=True)
while True: time.sleep(1)
"""


@pytest.fixture
def silent(tmp_path: Path) -> Path:
    (place := tmp_path / "silent").mkdir(mode=0o777)
    return place


def test_volume_that_is_covered_by_a_filesystem_is_refused_in_words(tenant: Tenant, tmp_path: Path) -> None:
    pod = tenant.pod()
    volume = tenant.empty_dir(pod)
    id = tenant.cri.run(pod, "app", ("sleep", "600"), mounts=[tenant.mounted(volume)])
    with silent_filesystem(volume) as filesystem:
        filesystem.speaking.clear()
        words = refused("kybernate", "checkpoint", id, str(tmp_path / "image"))
        assert "a filesystem of the kind fuse is mounted on the volume" in words
        assert tenant.cri.state(id) == "CONTAINER_RUNNING"
        tenant.cri.stop(id)


def test_operation_on_files_of_a_silent_filesystem_ends_by_its_deadline(silent: Path, tmp_path: Path) -> None:
    own = Ctr(image=PYTHON)
    with silent_filesystem(silent) as filesystem:
        flags = ["--mount", f"type=bind,src={silent},dst=/silent,options=rbind:rw"]
        with own.running("python3", "-c", BINDING, flags=flags) as id:
            eventually(lambda: "/silent/socket" in Path(f"/proc/{own.pid(id)}/net/unix").read_text() or None)
            filesystem.speaking.clear()
            argv = ["kybernate", "checkpoint", id, str(tmp_path / "image"), "--no-rootfs", "--timeout", DEADLINE]
            done = finished(argv, timeout=SECONDS)
            filesystem.speaking.set()
            assert done.returncode != 0 or (tmp_path / "image").exists()
            eventually(lambda: own.status(id) == "RUNNING" or None)
