"""The images of Kubernetes' end-to-end tests: their names, and what their registries hold."""

from __future__ import annotations

import json
from pathlib import Path

from tests.lab import e2e_images, oci

MANIFEST = """
	configs[Agnhost] = Config{list.PromoterE2eRegistry, "agnhost", "2.66.1"}
	configs[AgnhostPrev] = Config{list.PromoterE2eRegistry, "agnhost", "2.55"}
	configs[Etcd] = Config{list.GcEtcdRegistry, "etcd", "3.7.0-0"}
"""


def test_versions_are_those_that_the_tests_name(tmp_path: Path) -> None:
    manifest = tmp_path / "test/utils/image/manifest.go"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(MANIFEST)
    assert list(e2e_images.versions(tmp_path)) == [
        ("e2e-test-images/agnhost", "2.66.1"), ("e2e-test-images/agnhost", "2.55"), ("etcd", "3.7.0-0"),
    ]  # fmt: skip


def test_served_image_is_found_from_its_tag_to_its_layer(tmp_path: Path) -> None:
    e2e_images._write_served(oci.image("pause", b"a layer", Cmd=["pause"]), tmp_path)

    def content(kind: str, digest: str) -> bytes:
        name = digest.removeprefix("sha256:")
        return (tmp_path / kind / "sha256" / name[:2] / name / "data").read_bytes()

    manifest = json.loads(content("manifests", (tmp_path / "manifests/testing").read_text()))
    assert json.loads(content("blobs", manifest["config"]["digest"]))["config"] == {"Cmd": ["pause"]}
    assert [content("blobs", layer["digest"]) for layer in manifest["layers"]] == [b"a layer"]
