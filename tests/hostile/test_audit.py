"""Each checkpoint, restore and refusal leaves one line that names the pod, which the pod's author cannot forge."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.tenant import Tenant
from tests.system.checkpoints import kybernate, refused
from tests.system.ctr import Ctr

AUDIT = Path("/var/log/kybernate/audit.jsonl")
IMAGES = Path("/var/lib/kybernate/checkpoints")
RESTORE_FROM = "kybernate.io/restore-from"
COUNT = ("sh", "-c", "i=0; while :; do i=$((i+1)); sleep 0.05; done")
FORGED = '{"verb":"restore","decision":"done","requester":{"kind":"node"}}'


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """Begin with no audit log, as a new node does."""
    shutil.rmtree(AUDIT.parent, ignore_errors=True)
    yield
    shutil.rmtree(AUDIT.parent, ignore_errors=True)


@pytest.fixture
def image(tenant: Tenant) -> Iterator[Path]:
    path = IMAGES / tenant.namespace / "audited"
    yield path
    shutil.rmtree(path.parent, ignore_errors=True)


def lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in AUDIT.read_text().splitlines()]


def test_checkpoint_and_restore_name_pod_image_and_caller(tenant: Tenant, image: Path) -> None:
    pod = tenant.pod()
    container = tenant.cri.run(pod, "app", COUNT)
    kybernate("checkpoint", "--namespace", "k8s.io", container, str(image))
    second = tenant.pod()
    again = tenant.cri.run(second, "app", COUNT, annotations={RESTORE_FROM: image.name})
    saved, allowed, done = lines()
    assert (saved["verb"], saved["decision"], saved["task"]) == ("checkpoint", "done", container)
    assert saved["requester"] == requester(pod, "app")
    assert (saved["caller"]["by"], saved["caller"]["uid"]) == ("kybernate", 0)
    assert (allowed["verb"], allowed["decision"], allowed["task"]) == ("restore", "allowed", again)
    assert (done["verb"], done["decision"], done["task"]) == ("restore", "done", again)
    for line in (allowed, done):
        assert line["requester"] == requester(second, "app")
        assert line["caller"]["by"] == "containerd"
        assert line["image"] == saved["image"]
    source = pod.config.metadata
    assert saved["image"]["path"] == str(image)
    assert saved["image"]["manifest_digest"].startswith("sha256:")
    assert (saved["image"]["source_namespace"], saved["image"]["source_pod"]) == (source.namespace, source.name)
    assert stat.S_IMODE(AUDIT.stat().st_mode) == 0o600
    assert stat.S_IMODE(AUDIT.parent.stat().st_mode) == 0o700


def requester(pod: Any, container: str) -> dict[str, str]:
    source = pod.config.metadata
    return {
        "kind": "tenant", "namespace": source.namespace, "pod": source.name, "uid": source.uid, "container": container,
    }  # fmt: skip


def test_refused_restore_names_the_pod_and_the_reason(tenant: Tenant) -> None:
    pod = tenant.pod()
    error = tenant.refused(pod, "app", annotations={RESTORE_FROM: "no-such-image"})
    (line,) = lines()
    assert (line["verb"], line["decision"]) == ("restore", "refused")
    assert line["requester"] == requester(pod, "app")
    assert line["image"]["path"] == "no-such-image"  # in the pod's words
    assert line["reason"] in error


@pytest.mark.parametrize("place", ["annotation", "environment"])
def test_no_value_of_a_pod_begins_a_line(tenant: Tenant, place: str, shim_config: Path) -> None:
    shim_config.write_text("restore_from_env = true")
    value = f"x\n{FORGED}\n\r\x1b[2K\x7f\u2028{FORGED}"
    chosen = {"annotations": {RESTORE_FROM: value}} if place == "annotation" else {"env": {"RESTORE_FROM": value}}
    tenant.refused(tenant.pod(), "app", **chosen)
    content = AUDIT.read_bytes()
    assert content.count(b"\n") == 1
    assert all(0x20 <= byte < 0x7F for byte in content[:-1])
    (line,) = lines()
    assert (line["decision"], line["requester"]["kind"]) == ("refused", "tenant")


def test_suspend_without_a_gpu_is_a_line(tenant: Tenant, no_helper: None) -> None:
    pod = tenant.pod()
    container = tenant.cri.run(pod, "app", COUNT)
    refused("kybernate", "suspend", "--namespace", "k8s.io", container)
    (line,) = lines()
    assert (line["verb"], line["decision"], line["caller"]["by"]) == ("suspend", "refused", "kybernate")
    assert line["requester"] == requester(pod, "app")


def test_log_that_is_a_link_is_not_followed_and_stops_nothing(ours: Ctr, image: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("")
    AUDIT.parent.mkdir(mode=0o700)
    AUDIT.symlink_to(victim)
    with ours.running(*COUNT) as container:
        kybernate("checkpoint", container, str(image))
    assert victim.read_text() == ""
