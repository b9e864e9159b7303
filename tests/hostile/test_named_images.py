"""A pod's author names an image, or options for CRIU: which of them count, and what the pod's events say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.tenant import Tenant
from tests.system.checkpoints import COUNT, kybernate
from tests.system.cri import Cri, Pod
from tests.system.ctr import Ctr, eventually
from tests.system.tenants import pods_place, sign_for

FROM = "kybernate.io/restore-from"
SECRET = "token-of-tenant-a"


def counting(tenant: Tenant, **options: object) -> tuple[Pod, str]:
    """Run a pod of the tenant's that counts, with a secret in its environment."""
    pod = tenant.pod()
    id = tenant.cri.run(pod, "c", COUNT, env={"SECRET": SECRET}, **options)
    tenant.cri.await_log(pod, "c", "3")
    return pod, id


@pytest.fixture
def image(tenant: Tenant) -> Iterator[Path]:
    """An image of tenant-a's pod, which his next pods may name."""
    with pods_place("tenant-a") as place:
        pod, _ = counting(tenant)
        kybernate("checkpoint", f"tenant-a/{pod.config.metadata.name}", str(place), "--exit")
        yield place


def script(volume: Path) -> tuple[Path, Path]:
    """Put options for CRIU into a volume that make it run a program; return them, and what the program makes."""
    proof, program, options = volume / "proof", volume / "program", volume / "criu.conf"
    program.write_text(f"#!/bin/sh\nid > {proof}\n")
    program.chmod(0o755)
    options.write_text(f"action-script {program}\n")
    return options, proof


@pytest.mark.parametrize("annotation", ["org.criu.config", "kybernate.io/criu-config"])
def test_options_for_criu_are_not_the_pods_choice(tenant: Tenant, annotation: str) -> None:
    pod = tenant.pod()
    options, proof = script(tenant.empty_dir(pod))
    chosen = {annotation: str(options)}
    tenant.cri.run(pod, "c", COUNT, annotations=chosen)
    tenant.cri.await_log(pod, "c", "3")
    with pods_place("tenant-a") as place:
        kybernate("checkpoint", f"tenant-a/{pod.config.metadata.name}", str(place), "--exit")
        assert not proof.exists()
        manifest = json.loads((place / "kybernate-manifest.json").read_text())
        assert not any("action-script" in line for line in manifest["criu"]["options"])
        second = tenant.pod(annotations={FROM: place.name, **chosen})
        id = tenant.cri.run(second, "c", COUNT, annotations=chosen)
        assert eventually(lambda: tenant.cri.log(second, "c"))
        assert tenant.cri.state(id) == "CONTAINER_RUNNING"
        assert not proof.exists()


@pytest.mark.parametrize("way", ["annotation", "environment"])
def test_an_image_in_a_volume_is_not_restored(tenant: Tenant, image: Path, shim_config: Path, way: str) -> None:
    shim_config.write_text("restore_from_env = true\n")
    pod = tenant.pod()
    forged = tenant.empty_dir(pod) / "image"
    shutil.copytree(image, forged)
    names = [str(forged), f"../../../../../{forged}", f"/var/lib/kybernate/checkpoints/tenant-a/../../../../..{forged}"]
    for attempt, name in enumerate(names):
        wish = {"annotations": {FROM: name}} if way == "annotation" else {"env": {"RESTORE_FROM": name}}
        said = tenant.refused(pod, "c", attempt=attempt, **wish)  # type: ignore[arg-type]
        assert "Nothing was restored" in said
        assert "names the image by the path" in said or "is not the name of an image" in said


def test_a_link_among_the_images_is_not_followed(tenant: Tenant, image: Path) -> None:
    pod = tenant.pod()
    forged = tenant.empty_dir(pod) / "image"
    shutil.copytree(image, forged)
    link = image.with_name("link")
    link.symlink_to(forged)
    try:
        assert "is a link" in tenant.refused(pod, "c", annotations={FROM: "link"})
    finally:
        link.unlink()


def test_the_environment_alone_restores_nothing(tenant: Tenant, image: Path) -> None:
    pod = tenant.pod()
    id = tenant.cri.run(pod, "c", ["sh", "-c", "echo fresh; sleep 600"], env={"RESTORE_FROM": image.name})
    tenant.cri.await_log(pod, "c", "fresh")
    assert tenant.cri.state(id) == "CONTAINER_RUNNING"


def edited(image: Path, **mount: str) -> None:
    """Change the first mount of an image's manifest, and sign it again: what only the node's root could do."""
    path = image / "kybernate-manifest.json"
    manifest = json.loads(path.read_text())
    manifest["mounts"][0].update(mount)
    path.write_text(json.dumps(manifest))


def test_a_changed_manifest_is_refused(tenant: Tenant, image: Path) -> None:
    edited(image, kind="hook", source="/")
    said = tenant.refused(tenant.pod(), "c", annotations={FROM: image.name})
    assert "the manifest was changed after it was signed" in said


@pytest.mark.parametrize("source", ["/", "/etc", "/x\naction-script /scratch/program"])
def test_mounts_of_the_host_are_the_nodes_policy(cri: Cri, tenant: Tenant, source: str) -> None:
    """Even a signed manifest mounts nothing of the host's that the node's configuration does not name."""
    with pods_place("tenant-a") as place:
        pod = tenant.pod()
        volume = tenant.empty_dir(pod)
        cri.run(pod, "c", COUNT, mounts=[tenant.mounted(volume)])
        cri.await_log(pod, "c", "3")
        kybernate("checkpoint", f"tenant-a/{pod.config.metadata.name}", str(place), "--exit")
        path = place / "kybernate-manifest.json"
        manifest = json.loads(path.read_text())
        for mount in manifest["mounts"]:
            if mount["destination"] == "/scratch":
                mount.update(kind="hook", source=source)
        path.write_text(json.dumps(manifest))
        sign_for(place, "tenant-a")
        said = tenant.refused(tenant.pod(), "c", annotations={FROM: place.name})
        assert "which `hook_mounts` of this node's configuration does not have" in said


def test_a_read_only_volume_does_not_become_writable(tenant: Tenant) -> None:
    """CRIU mounts with the flags of the image, in which the volume was writable."""
    with pods_place("tenant-a") as place:
        pod = tenant.pod()
        volume = tenant.empty_dir(pod)
        tenant.cri.run(pod, "c", COUNT, mounts=[tenant.mounted(volume)])
        tenant.cri.await_log(pod, "c", "3")
        kybernate("checkpoint", f"tenant-a/{pod.config.metadata.name}", str(place), "--exit")
        wish = {FROM: place.name}
        new = tenant.pod()
        unwritable = tenant.mounted(tenant.empty_dir(new), readonly=True)
        said = tenant.refused(new, "c", annotations=wish, mounts=[unwritable])
        assert "/scratch is writable in the image and read-only in the new container's configuration" in said
        second = tenant.pod()
        own = tenant.mounted(tenant.empty_dir(second))
        id = tenant.cri.run(second, "c", COUNT, annotations=wish, mounts=[own])
        assert tenant.cri.state(id) == "CONTAINER_RUNNING"


def test_another_tenants_image_is_out_of_reach(image: Path, other_tenant: Tenant) -> None:
    pod = other_tenant.pod()
    names = [
        image.name,
        f"../tenant-a/{image.name}",
        str(image),
        f"/var/lib/kybernate/checkpoints/tenant-b/../tenant-a/{image.name}",
    ]
    for attempt, name in enumerate(names):
        assert "Nothing was restored" in other_tenant.refused(pod, "c", annotations={FROM: name}, attempt=attempt)


def test_an_image_that_was_moved_to_another_namespace_is_refused(image: Path, other_tenant: Tenant) -> None:
    with pods_place("tenant-b") as place:
        shutil.copytree(image, place)
        said = other_tenant.refused(other_tenant.pod(), "c", annotations={FROM: place.name})
    assert "is an image of namespace tenant-a, and pod tenant-b/" in said


def test_an_image_of_a_container_without_a_pod_is_roots(tenant: Tenant, ours: Ctr) -> None:
    """A privileged container's image, made by root, gives no pod anything."""
    with pods_place("tenant-a") as place, ours.running(*COUNT, flags=["--privileged"]) as id:
        kybernate("checkpoint", id, str(place))
        said = tenant.refused(tenant.pod(), "c", annotations={FROM: place.name})
    assert "is an image of no namespace" in said


def test_ones_own_image_is_restored(tenant: Tenant, image: Path) -> None:
    pod = tenant.pod(annotations={FROM: image.name})
    id = tenant.cri.run(pod, "c", ["/never/run"])
    assert int(eventually(lambda: tenant.cri.log(pod, "c"))[0]) > 3
    assert SECRET in tenant.cri.exec(id, "cat", "/proc/1/environ")[1]
