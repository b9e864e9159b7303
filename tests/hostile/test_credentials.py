"""No restored process has more than its pod allows: images of more privileged containers, and images that are altered.

The pod that restores has uid 1000, no capability and no_new_privs, as the restricted profile of Kubernetes demands.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.linux.private_files import make_directory
from tests.hostile.tenant import Tenant
from tests.system.checkpoints import PYTHON, save
from tests.system.cri import Pod
from tests.system.ctr import Ctr, eventually
from tests.system.programs import CRIU

IMAGES = Path("/var/lib/kybernate/checkpoints")
CONFINED: dict[str, Any] = {"drop": ["ALL"], "no_new_privs": True, "seccomp": "RuntimeDefault"}
RESTRICTED: dict[str, Any] = {"run_as": 1000, **CONFINED}
COUNT = ["sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done"]
# It never holds a file of the volume open, which the new pod's volume would lack.
MARK = ["sh", "-c", "while :; do mkdir -p /scratch/mark; echo ran; sleep 0.02; done"]
THREADS = """
import threading, time
for _ in range(8):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
number = 0
while True:
    number += 1
    print(number, flush=True)
    time.sleep(0.1)
"""
# Begins as root, as servers do, and gives up what it does not need; its child stays what it was.
DROPPING = """
import os, time
if os.fork() == 0:
    while True:
        time.sleep(1000)
os.setgroups([77])
os.setresgid(33, 33, 33)
os.setresuid(33, 33, 33)
number = 0
while True:
    number += 1
    print(number, flush=True)
    time.sleep(0.1)
"""
# Stands in for CRIU. `{before}` is what an attacker does to the image between the look at it and CRIU's own.
STAND_IN = """#!/bin/sh
if [ "$1" = swrk ]; then
    {before}
fi
exec {criu} "$@"
"""
# Every bounding, permitted and effective set of the image gets the first seven capabilities.
ALTER = """
import sys
from pathlib import Path
for path in Path(sys.argv[1]).glob("core-*.img"):
    content = path.read_bytes()
    path.write_bytes(content.replace(b"P\\0P\\0X\\0X\\0`\\0`\\0", b"P\\x7fP\\0X\\x7fX\\0`\\x7f`\\0"))
"""


@pytest.fixture
def criu(tmp_path: Path, shim_config: Path) -> Callable[[str], None]:
    """Make the shim use another CRIU; the function sets what that does before it begins."""
    path = tmp_path / "bin/criu"
    path.parent.mkdir()

    def write(before: str) -> None:
        path.write_text(STAND_IN.format(before=before, criu=CRIU))
        path.chmod(0o755)

    write(":")
    shim_config.write_text(f'criu = "{path}"\n')
    return write


@pytest.fixture
def image(tenant: Tenant) -> Iterator[Path]:
    """The directory where the tenant's pods find the image `one`."""
    path = IMAGES / tenant.namespace / "one"
    make_directory(path.parent)  # and those above it: no file of this test may be in sight of others
    yield path
    shutil.rmtree(path.parent)


def checkpoint(tenant: Tenant, pod: Pod, into: Path, command: list[str], line: str, **options: Any) -> None:
    """Run a container of the pod until it has written a line, and checkpoint it."""
    id = tenant.cri.run(pod, "c", command, **options)
    tenant.cri.await_log(pod, "c", line)
    save(Ctr(namespace="k8s.io"), pod.id, into, id=id)
    tenant.cri.stop(id)


def restoring(tenant: Tenant, **options: Any) -> Pod:
    return tenant.pod(annotations={"kybernate.io/restore-from": "one"}, **options)


def test_privileged_image_is_refused_before_criu_starts(tenant: Tenant, image: Path) -> None:
    with tenant.cri.pod(namespace=tenant.namespace, privileged=True) as pod:
        checkpoint(tenant, pod, image, COUNT, "3", privileged=True)
    pod = restoring(tenant)
    reason = tenant.refused(pod, "c", **RESTRICTED)
    for text in (
        "process 1 (sh): uid 0, the pod allows 1000 only",
        "bounding and permitted and effective capabilities CAP_CHOWN",
        "the pod allows none",
        "no_new_privs is not set, the pod sets it",
        "Nothing was restored",
    ):
        assert text in reason, reason
    assert tenant.cri.log(pod, "c") == []


@pytest.mark.parametrize(
    ("had", "wants", "text"),
    [
        pytest.param({}, {"no_new_privs": True}, "no_new_privs is not set", id="no_new_privs"),
        pytest.param({"add": ["NET_ADMIN"]}, {}, "capabilities CAP_NET_ADMIN, the pod allows", id="capability"),
        pytest.param({"seccomp": "Unconfined"}, {"seccomp": "RuntimeDefault"}, "seccomp mode 0 with 0", id="seccomp"),
    ],
)
def test_each_excess_is_named(
    tenant: Tenant, image: Path, had: dict[str, Any], wants: dict[str, Any], text: str
) -> None:
    with tenant.cri.pod(namespace=tenant.namespace) as pod:
        checkpoint(tenant, pod, image, COUNT, "3", **had)
    assert text in tenant.refused(restoring(tenant), "c", **wants)


def test_image_that_is_altered_after_the_look_never_runs(
    tenant: Tenant, image: Path, tmp_path: Path, criu: Callable[[str], None]
) -> None:
    directory = tmp_path / "of the node"  # whose content is in no image
    directory.mkdir()
    directory.chmod(0o777)
    with tenant.cri.pod(namespace=tenant.namespace) as pod:
        checkpoint(tenant, pod, image, MARK, "ran", mounts=[tenant.mounted(directory)], **CONFINED)
    (directory / "mark").rmdir()
    (tmp_path / "alter.py").write_text(ALTER)
    criu(f"/opt/kybernate/bin/python {tmp_path}/alter.py {image} || exit 1")
    pod = restoring(tenant)
    reason = tenant.refused(pod, "c", mounts=[tenant.mounted(directory)], **CONFINED)
    assert "bounding and permitted and effective capabilities CAP_CHOWN" in reason, reason
    assert "the pod allows none" in reason
    assert "killed before they ran" in reason
    assert not (directory / "mark").exists()
    assert tenant.cri.log(pod, "c") == []


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="root"),
        pytest.param({"run_as": 1000}, id="user"),
        pytest.param({"seccomp": "RuntimeDefault"}, id="seccomp"),
        pytest.param(CONFINED, id="confined"),
        pytest.param(RESTRICTED, id="restricted"),
    ],
)
def test_equal_pod_restores_what_it_had(tenant: Tenant, image: Path, options: dict[str, Any]) -> None:
    with tenant.cri.pod(namespace=tenant.namespace) as pod:
        checkpoint(tenant, pod, image, COUNT, "3", **options)
    pod = restoring(tenant)
    tenant.cri.run(pod, "c", ["false"], **options)
    assert int(eventually(lambda: tenant.cri.log(pod, "c"))[0]) > 3


@pytest.mark.as_root("as servers begin, which then give up what they do not need")
@pytest.mark.parametrize("program", [THREADS, DROPPING], ids=["threads", "dropped"])
def test_threads_and_dropped_privileges_are_restored(tenant: Tenant, image: Path, program: str) -> None:
    options = {"seccomp": "RuntimeDefault", "no_new_privs": True}
    with tenant.cri.pod(namespace=tenant.namespace) as pod:
        checkpoint(tenant, pod, image, ["python3", "-c", program], "3", image=PYTHON, **options)
    pod = restoring(tenant)
    tenant.cri.run(pod, "c", ["false"], image=PYTHON, **options)
    assert int(eventually(lambda: tenant.cri.log(pod, "c"))[0]) > 3
