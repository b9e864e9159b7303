"""Checkpoint images through a real image registry and real layouts, which containerd pulls, lists and restores."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.image.verification import verify
from kybernate_shim.config import Config
from tests.lab.root import REGISTRY_STORAGE
from tests.system.checkpoints import COUNT, refused
from tests.system.cri import Cri
from tests.system.ctr import BUSYBOX, Ctr, run
from tests.system.images import removed
from tests.system.test_checkpoint import COUNTED, Counter, counting, restored

REGISTRY = "localhost:5000/checkpoints"
SECRET = "a-secret-that-is-in-the-environment"


@pytest.fixture
def ctr() -> Ctr:
    return Ctr(run_flags=["--env", f"SECRET={SECRET}"])


@pytest.fixture
def roots() -> Iterator[Path]:
    """The node's directory of images, without those of a test afterwards."""
    root = Config().checkpoint_root
    before = {path for path in root.rglob("*") if path.is_dir()} if root.exists() else set()
    yield root
    for path in root.rglob("*"):
        if path.is_dir() and path not in before:
            shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def counter(ctr: Ctr, tmp_path: Path) -> Iterator[Counter]:
    with counting(ctr, tmp_path / "log") as one:
        one.goes_on()
        yield one


def configure(config: Path, directory: Path, *keys: str) -> None:
    """Give the node keys, by the names of their settings."""
    for name in keys:
        (directory / name).write_text("5e" * 32)
        (directory / name).chmod(0o600)
    config.write_text("".join(f'{name} = "{directory / name}"\n' for name in keys))


def pushed(image: str, repository: str, *flags: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(
        run(["kybernate", "push", image, f"{REGISTRY}/{repository}", "--json", *flags])
    )
    return found


def test_container_resumes_from_what_was_pushed_and_pulled(
    ctr: Ctr, counter: Counter, roots: Path, tmp_path: Path
) -> None:
    run(["kybernate", "checkpoint", counter.id, "before", "--exit"])
    last = counter.lines[-1]
    first = pushed("before", "counter:v1")
    assert pushed("before", "counter:v2")["sent_bytes"] == 0
    shutil.rmtree(roots / "before")
    run(["kybernate", "pull", f"{REGISTRY}/counter@{first['digest']}", "after", "--yes"])
    assert not verify(roots / "after")
    with restored(ctr, roots / "after", tmp_path / "log2") as second:
        assert second.goes_on(after=last) == last + 1


def test_containerd_pulls_and_lists_what_was_pushed_and_imports_a_layout(
    ctr: Ctr, counter: Counter, roots: Path, tmp_path: Path
) -> None:
    run(["kybernate", "checkpoint", counter.id, "before"])
    digest = str(pushed("before", "listed:v1")["digest"])
    with removed(f"{REGISTRY}/listed:v1", f"{REGISTRY}/layout:v1"):
        run(["ctr", "images", "pull", "--plain-http", f"{REGISTRY}/listed:v1"], timeout=120)
        layout = ["kybernate", "export", "before", str(tmp_path / "image.tar"), "--name", f"{REGISTRY}/layout:v1"]
        run([*layout, "--compression", "gzip"])
        run(["ctr", "images", "import", str(tmp_path / "image.tar")], timeout=120)
        listed = {line.split()[0]: line.split()[2] for line in run(["ctr", "images", "ls"]).splitlines()[1:]}
    assert listed[f"{REGISTRY}/listed:v1"] == digest
    assert f"{REGISTRY}/layout:v1" in listed


@pytest.fixture
def cri() -> Iterator[Cri]:
    with Cri(handler="kybernate") as client:
        yield client


def test_cri_restores_a_pod_from_the_pushed_image(
    cri: Cri, cri_restore: None, roots: Path, tmp_path: Path, shim_config: Path
) -> None:
    configure(shim_config, tmp_path, "shared_key")  # so that the digests hold
    cri.pull(BUSYBOX)
    reference = f"{REGISTRY}/pod:v1"
    with cri.pod() as pod:
        cri.run(pod, "counter", COUNT)
        cri.await_log(pod, "counter", str(COUNTED))
        run(["kybernate", "checkpoint", f"default/{pod.config.metadata.name}", "pod-image", "--exit"])
        last = int(cri.log(pod, "counter")[-1])
    pushed("default/pod-image", "pod:v1")
    with removed(reference, namespace="k8s.io"):
        cri.pull(reference)
        with cri.pod() as pod:
            id = cri.create(pod, "counter", [], image=reference)
            cri.start(id)
            assert int(cri.await_log(pod, "counter", str(last + COUNTED))[0]) == last + 1
            assert cri.exec(id, "echo", "hello") == (0, "hello\n")


def test_encrypted_image_stays_encrypted_and_is_restored(
    ctr: Ctr, counter: Counter, roots: Path, tmp_path: Path, shim_config: Path
) -> None:
    configure(shim_config, tmp_path, "shared_key", "encryption_key")
    run(["kybernate", "checkpoint", counter.id, "sealed", "--exit"])
    last = counter.lines[-1]
    digest = pushed("sealed", "sealed:v1", "--compression", "none")["digest"]
    run(["kybernate", "export", "sealed", str(tmp_path / "c.tar"), "--format", "checkpointctl"])
    assert SECRET.encode() not in (tmp_path / "c.tar").read_bytes()
    blobs = list(Path("/", REGISTRY_STORAGE).rglob("data"))
    assert any(str(digest).removeprefix("sha256:") in str(blob) for blob in blobs)
    assert not any(SECRET.encode() in blob.read_bytes() for blob in blobs)
    run(["kybernate", "pull", f"{REGISTRY}/sealed:v1", "again"])  # a key that is valid here has signed it
    with restored(ctr, roots / "again", tmp_path / "log2") as second:
        assert second.goes_on(after=last) == last + 1
    (tmp_path / "shared_key").write_text("6f" * 32)
    said = refused("kybernate", "pull", f"{REGISTRY}/sealed:v1", "third", "--yes")
    assert "is encrypted, and no key that is valid here has signed it" in said
    assert not (roots / "third").exists()
