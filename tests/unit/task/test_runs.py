"""What is remembered of the runs of a pod's containers, for as long as the pod is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.checkpoint.image.starts import Run
from kybernate_shim.oci.spec import Spec
from kybernate_shim.task.runs import MOST_BYTES, MOST_CONTAINERS, MOST_RUNS, PodRuns
from kybernate_shim.trust.requester import CONTAINER_NAME, POD_UID, SANDBOX_ID


def spec(*sources: Path | str, container: str = "main", uid: str = "uid-1", **notes: str) -> Spec:
    document: dict[str, Any] = {
        "annotations": {POD_UID: uid, CONTAINER_NAME: container, SANDBOX_ID: "sandbox", **notes},
        "mounts": [{"source": str(source), "destination": "/x"} for source in sources],
    }
    return Spec(document)


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    directory = tmp_path / "kubelet/pods/uid-1"
    directory.mkdir(parents=True)
    return directory


def runs(tmp_path: Path, pod: Path, container: str = "main") -> PodRuns:
    tmp_path.chmod(0o700)
    found = PodRuns.of(spec(pod / "etc-hosts", container=container, uid=pod.name), tmp_path / "work")
    assert found is not None
    return found


def test_runs_are_read_back_in_order_each_container_its_own(tmp_path: Path, pod: Path) -> None:
    main, other = runs(tmp_path, pod), runs(tmp_path, pod, "other")
    assert main.read() == ()
    for number in range(3):
        main.add(Run(f"i{number}", number))
    other.add(Run("", 7.5))
    assert main.read() == (Run("i0", 0), Run("i1", 1), Run("i2", 2))
    assert other.read() == (Run("", 7.5),)
    assert main.file.stat().st_mode & 0o077 == 0


def test_what_is_kept_is_bounded(tmp_path: Path, pod: Path) -> None:
    for number in range(MOST_RUNS + 5):
        runs(tmp_path, pod).add(Run(str(number), 1))
    assert [run.image for run in runs(tmp_path, pod).read()] == [str(n) for n in range(5, MOST_RUNS + 5)]
    for number in range(MOST_CONTAINERS + 5):
        runs(tmp_path, pod, f"debugger-{number}").add(Run("", 1))
    assert runs(tmp_path, pod).file.stat().st_size < MOST_BYTES / 8


def test_a_pod_that_is_gone_is_forgotten(tmp_path: Path, pod: Path) -> None:
    gone = runs(tmp_path, pod)
    gone.add(Run("i", 1))
    other = pod.with_name("uid-2")
    other.mkdir()
    pod.rmdir()
    runs(tmp_path, other).add(Run("j", 1))
    assert not gone.file.exists()
    assert runs(tmp_path, other).read() == (Run("j", 1),)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"containers": []}', '{"containers": {"main": [1, ["i"], [1, 2]]}}']
)
def test_a_damaged_file_is_as_none(tmp_path: Path, pod: Path, content: str) -> None:
    main = runs(tmp_path, pod)
    main.add(Run("i", 1))
    main.file.write_text(content)
    assert main.read() == ()
    main.add(Run("j", 2))
    assert main.read() == (Run("j", 2),)


def test_without_a_kubelet_the_sandbox_is_what_it_lives_with(tmp_path: Path) -> None:
    found = PodRuns.of(spec("/srv", "/var/lib/containerd/sandboxes/sandbox/hostname"), tmp_path)
    assert found is not None
    assert found.lives_with == "/var/lib/containerd/sandboxes/sandbox"


@pytest.mark.parametrize(
    "of",
    [
        Spec({}),
        spec("/var/lib/kubelet/pods/uid-1/etc-hosts", uid="../x"),
        spec("/var/lib/kubelet/pods/uid-1/etc-hosts", **{SANDBOX_ID: ""}),  # made by `kybernate restore`
        spec("/var/lib/kubelet/pods/another/etc-hosts"),
        spec(),
    ],
)
def test_what_is_no_pods_has_no_runs(of: Spec, tmp_path: Path) -> None:
    assert PodRuns.of(of, tmp_path) is None
