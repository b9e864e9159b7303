"""Archives of `crictl checkpoint`, which containerd writes: shown, imported, and a pod from one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system import identity
from tests.system.checkpoints import kybernate
from tests.system.cri import Cri

# Removes a file of the image where it can, which root alone does.
COUNTER = (
    "mkdir /tmp/srv; echo kept > /tmp/srv/kept; rm /etc/passwd || true;"
    " i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done"
)
ROOT = pytest.mark.as_root("it removes a file of the image")


@pytest.fixture
def cri() -> Iterator[Cri]:
    with Cri() as client:
        yield client


@pytest.mark.parametrize("command", [pytest.param("import", marks=ROOT), "pull"])
def test_pod_resumes_from_an_archive_with_its_changed_files(
    cri: Cri, pods_image: Path, tmp_path: Path, command: str
) -> None:
    archive = tmp_path / "web.tar"
    with cri.pod() as pod:
        id = cri.run(pod, "counter", ["sh", "-c", COUNTER])
        cri.await_log(pod, "counter", "5")
        if not cri.checkpoint(id, archive):
            return  # containerd 1.7 has refused it
        cri.exec(id, "rm", "/tmp/srv/kept")
    shown = json.loads(kybernate("inspect", str(archive), "--json"))
    assert shown["manifest"]["rootfs_diff"] is True
    found = json.loads(kybernate("inspect", str(archive), "--verify", "--json", status=1))["problems"]
    assert [one["kind"] for one in found] == ["signature"], "containerd's own files are under no signature"
    kybernate(command, str(archive), pods_image.name, "--yes", "--namespace", "default")
    with cri.pod(annotations={"kybernate.io/restore-from": pods_image.name}) as pod:
        id = cri.run(pod, "counter", ["/never/run"])
        cri.await_log(pod, "counter", "20")
        assert int(cri.log(pod, "counter")[0]) > 5
        assert cri.exec(id, "cat", "/tmp/srv/kept") == (0, "kept\n")
        assert (cri.exec(id, "test", "-e", "/etc/passwd")[0] == 0) is (identity.user() is not None)
