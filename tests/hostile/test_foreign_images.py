"""A tenant hands root an image of his own making: what it asks for, and what becomes of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.image.digests import Digester
from kybernate_shim.checkpoint.image.manifest import Signature
from kybernate_shim.checkpoint.image.store import read_image, write_manifest
from tests.system.checkpoints import Witness, counting, kybernate, refused
from tests.system.ctr import Ctr, run
from tests.system.tenants import ROOT

SPEC = "kybernate-spec.json"


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    return tmp_path / "proof"


@pytest.fixture
def forged(ours: Ctr, tmp_path: Path, proof: Path) -> Iterator[Path]:
    """A whole image, with digests that fit, whose configuration has a hook: a program that runs on the node as root."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nid > {proof}\n")
    program.chmod(0o755)
    image = tmp_path / "image"
    with counting(ours) as counter:
        kybernate("checkpoint", counter.id, str(image), "--exit")
    manifest = read_image(image).manifest
    spec = json.loads((image / SPEC).read_text())
    spec["hooks"] = {stage: [{"path": str(program)}] for stage in ("prestart", "createRuntime", "poststop")}
    (image / SPEC).write_text(json.dumps(spec))
    with Digester() as digester:
        files = digester.files(image, [file.name for file in manifest.files])
    write_manifest(image, replace(manifest, files=files, signature=Signature()), durable=False)
    yield image
    shutil.rmtree(image)


@pytest.fixture
def name() -> Iterator[str]:
    name = f"forged-{os.getpid()}"
    yield name
    shutil.rmtree(ROOT / "tenant-a" / name, ignore_errors=True)


def test_forged_image_decides_nothing(forged: Path, proof: Path) -> None:
    said = refused("kybernate", "restore", str(forged), "--detach")
    assert "the image is not signed" in said
    assert "hooks: programs of the node that run as root" in said
    assert not proof.exists()


def test_import_shows_the_hook_and_a_namespaces_image_never_runs_it(
    ours: Ctr, forged: Path, proof: Path, name: str
) -> None:
    shown = kybernate("import", str(forged), name, "--namespace", "tenant-a", "--yes")
    assert f"createRuntime: {forged.parent}/program" in shown
    restored = Witness(ours.new_id("r"), forged.parent / "log")
    where = ["--namespace", "default", "--name", restored.id, "--log", str(restored.log)]
    try:
        kybernate("restore", f"tenant-a/{name}", *where, "--detach")
        restored.assert_goes_on()
    finally:
        ours.remove(restored.id)
        run(["ctr", "snapshot", "rm", restored.id], status=None)
    assert not proof.exists()
