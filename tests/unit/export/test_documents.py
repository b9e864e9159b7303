"""What other programs read of an exported image, references, and credentials."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate.export import documents, oci_layout
from kybernate.export.challenge import read_challenge
from kybernate.export.checkpoint_archive import write_archive
from kybernate.export.credentials import Credentials, credentials_for
from kybernate.export.cri_documents import image_ref
from kybernate.export.entries import Entry
from kybernate.export.layers import MOST_ALONE, Compression, LayerStream, grouped, layers_of, threshold
from kybernate.export.oci_layout import write_layout
from kybernate.export.reference import parsed
from kybernate.export.tar_stream import archive_bytes, archived, members
from kybernate.node.failure import Failure
from kybernate_shim.checkpoint.criu.images import DumpStats, stats
from kybernate_shim.checkpoint.image.manifest import Source
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.config import Config
from tests.unit.cli.saved_image import save


def dump(archive: Path, name: str) -> dict[str, object]:
    with tarfile.open(archive) as tar:
        file = tar.extractfile(name)
        assert file is not None
        found: dict[str, object] = json.load(file)
        return found


def test_archive_has_what_checkpointctl_requires(image: Image, tmp_path: Path) -> None:
    """It refuses an archive without the directory; it reads config.dump and spec.dump, and sums the files' sizes."""
    archive = tmp_path / "c.tar"
    assert write_archive(image, archive) == archive.stat().st_size
    with tarfile.open(archive) as tar:
        assert tar.getmember("checkpoint").isdir()
        assert {name for name in tar.getnames() if name.startswith("checkpoint/")} == {
            f"checkpoint/{path.name}" for path in image.path.iterdir()
        }
    config = dump(archive, "config.dump")
    assert (config["id"], config["rootfsImageName"], config["runtime"]) == ("counter", "registry:5000/web:1", "runc")
    assert config["rootfsImageRef"] == "registry:5000/web@sha256:ab"
    spec = dump(archive, "spec.dump")
    assert spec["process"] == {"args": ["count"]}
    assert spec["annotations"] == {
        "io.kubernetes.cri.container-name": "web",
        "io.kubernetes.cri.sandbox-name": "front",
        "io.kubernetes.cri.sandbox-namespace": "shop",
    }
    if program := shutil.which("checkpointctl"):  # which no registry of ours has
        said = subprocess.run([program, "inspect", "--all", archive], capture_output=True, text=True, check=True).stdout
        assert "Kubernetes namespace: shop" in said


def test_archive_has_what_cri_requires(image: Image, tmp_path: Path) -> None:
    write_archive(image, tmp_path / "c.tar")
    status = dump(tmp_path / "c.tar", "status.dump")
    assert status["metadata"] == {"name": "web"}
    annotations = status["annotations"]
    assert isinstance(annotations, dict)
    assert {"io.kubernetes.container.hash", "io.kubernetes.container.restartCount"} <= annotations.keys()
    with tarfile.open(tmp_path / "c.tar") as tar:
        tar.extract("stats-dump", tmp_path, filter="data")
    assert stats(tmp_path / "stats-dump") == DumpStats(1500, 4, 4)


def test_changes_of_the_root_filesystem_are_where_other_programs_look(config: Config, tmp_path: Path) -> None:
    from kybernate_shim.checkpoint.image.store import read_image

    save(config.checkpoint_root / "i", more={"kybernate-rootfs-diff.tar": b"changes"})
    write_archive(read_image(config.checkpoint_root / "i"), tmp_path / "c.tar")
    with tarfile.open(tmp_path / "c.tar") as tar:
        assert tar.getmember("rootfs-diff.tar").size == 7


def test_documents_of_an_encrypted_image_hold_no_configuration(image: Image) -> None:
    from kybernate_shim.checkpoint.image.manifest import Encryption

    sealed = replace(image, manifest=replace(image.manifest, encryption=Encryption("k", "w", 1 << 20)))
    (first, *_) = layers_of(sealed)
    contents = {entry.name: entry.content or b"" for entry in first.entries}
    assert b"count" not in contents["spec.dump"].replace(b"counter", b"")
    assert json.loads(contents["spec.dump"])["annotations"]["io.kubernetes.cri.sandbox-name"] == "front"


@pytest.mark.parametrize(
    ("image", "digest", "expected"),
    [
        ("h:5/a:v1", "sha256:ab", "h:5/a@sha256:ab"), ("h:5/a", "sha256:ab", "h:5/a@sha256:ab"),
        ("h/a@sha256:cd", "sha256:ab", "h/a@sha256:ab"), ("h/a:1", "", "h/a:1"),
        ("sha256:cd", "sha256:ab", "sha256:cd"),
    ],
)  # fmt: skip
def test_base_image_is_named_by_its_digest(image: str, digest: str, expected: str) -> None:
    assert image_ref(Source("c", image=image, image_digest=digest)) == expected


def test_layers_are_few_and_large_files_are_alone() -> None:
    files = [Entry(f"f{number}", (number % 7) * 3_000) for number in range(500)]
    total = sum(file.size for file in files)
    found = list(grouped(files, threshold(total)))
    assert [entry for layer in found for entry in layer.entries] == files
    assert len(found) <= 2 * MOST_ALONE + 1
    assert all(len(layer.entries) == 1 for layer in grouped([Entry("a", 10), Entry("b", 10)], 10))


def test_long_names_and_huge_files_have_headers(image: Image) -> None:
    from kybernate.export.tar_stream import header

    long = f"checkpoint/{'x' * 255}"
    stream = iter(b"".join(bytes(piece) for piece in archived([Entry(long, 3, b"abc"), Entry("d")])) for _ in range(1))
    data = memoryview(next(stream))
    assert len(data) == archive_bytes([Entry(long, 3, b"abc"), Entry("d")])
    offset = 0

    def read(size: int) -> bytes:
        nonlocal offset
        offset += size
        return bytes(data[offset - size : offset])

    found = []
    for member in members(read):
        found.append((member.name, member.size))
        read(member.size)
    assert found == [(long, 3), ("d", 0)]
    for size in (0, 8 << 30, 1 << 45):
        assert len(header("blobs/sha256/" + "0" * 64, size, long_size=True)) == 512
    del image


@pytest.mark.parametrize("directory", [True, False])
def test_interrupted_export_leaves_nothing(image: Image, tmp_path: Path, directory: bool) -> None:
    (tmp_path / "out").mkdir()

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_layout(
            image, tmp_path / "out/l", "v1", compression=Compression.NONE, directory=directory, progress=interrupt
        )
    with pytest.raises(KeyboardInterrupt):
        write_archive(image, tmp_path / "out/c", interrupt)
    assert list((tmp_path / "out").iterdir()) == []


def test_export_replaces_nothing(image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").write_text("kept")
    for directory in (True, False):
        with pytest.raises(Failure, match="exists"):
            write_layout(image, tmp_path / "there", "v1", compression=Compression.NONE, directory=directory)
    monkeypatch.setattr(oci_layout, "_require_free", lambda target: None)  # it appears in the meantime
    with pytest.raises(Failure, match="exists"):
        write_archive(image, tmp_path / "there")
    assert (tmp_path / "there").read_text() == "kept"


def test_digest_does_not_depend_on_the_number_of_processors(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    from kybernate.export import layers

    found = set()
    for threads in (1, 2, 4):
        monkeypatch.setattr(layers, "MOST_THREADS", threads)
        monkeypatch.setattr(layers.os, "sched_getaffinity", lambda pid: set(range(8)))
        big = layers.Layer((Entry("a", 6 << 20, bytes(range(256)) * (24 << 10)),))
        stream = LayerStream(big, Compression.ZSTD, lambda size: None)
        assert sum(len(piece) for piece in stream) > 0
        found.add(stream.descriptor)
    assert len(found) == 1


def test_index_names_the_image_for_containerd() -> None:
    descriptor = documents.descriptor_of(b"{}", documents.MANIFEST)
    (named,) = json.loads(documents.index(descriptor, "h:5/a:v1"))["manifests"]
    assert named["annotations"] == {"io.containerd.image.name": "h:5/a:v1", "org.opencontainers.image.ref.name": "v1"}
    (tagged,) = json.loads(documents.index(descriptor, "v1"))["manifests"]
    assert tagged["annotations"] == {"org.opencontainers.image.ref.name": "v1"}


@pytest.mark.parametrize("text", ["h/a", "h:5000/a/b:v1", "localhost/a@sha256:" + "0" * 64, "[::1]:5000/a:v"])
def test_reference_is_read(text: str) -> None:
    found = parsed(text)
    assert str(found) == text if ":" in text.partition("/")[2] else f"{text}:latest"


@pytest.mark.parametrize(
    "text",
    ["", "a", "/a", "h/", "h/A", "h/a:", "h/a:.x", "h/a@sha256:0", "h/../a", "h/a b", "u@h/a", "h/a?b", "http://h/a"],
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(Failure, match="is not a reference to an image of an image registry"):
        parsed(text)


def test_registry_on_this_machine_needs_no_tls() -> None:
    hosts = {
        "localhost": True,
        "localhost:5": True,
        "127.0.0.1:5": True,
        "[::1]:5": True,
        "localhost.evil": False,
        "h": False,
    }
    assert {host: parsed(f"{host}/a").is_local for host in hosts} == hosts


def entry(user: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:pass:word".encode()).decode()}


def test_credentials_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = tmp_path / "docker-credential-mine"
    helper.write_text(
        '#!/bin/sh\nread host || :\n[ "$host" = helped ] && echo \'{"Username": "<token>", "Secret": "s"}\' && exit\n'
        "echo credentials not found; exit 1\n"
    )
    helper.chmod(0o755)
    file = tmp_path / "config.json"
    helpers = {"helped": "mine", "unknown": "mine", "none": "absent"}
    file.write_text(json.dumps({"auths": {"h:5": entry("me"), "unknown": entry("other")}, "credHelpers": helpers}))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert credentials_for("h:5") == Credentials("me", "pass:word")
    assert credentials_for("helped") == Credentials(identity="s")
    assert credentials_for("unknown") == Credentials("other", "pass:word")
    assert not credentials_for("elsewhere")
    assert "pass:word" not in repr(credentials_for("h:5"))
    with pytest.raises(Failure, match="docker-credential-absent cannot be used"):
        credentials_for("none")


@pytest.mark.parametrize("content", ["{", "[]", '{"auths": {"h": {"auth": "?"}}}', '{"credsStore": "../x"}'])
def test_file_of_credentials_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "c").write_text(content)
    with pytest.raises(
        Failure, match=r"cannot be read: Expecting|is not a file of credentials|that is not base64|is not the name of"
    ):
        credentials_for("h", tmp_path / "c")
    with pytest.raises(Failure, match="does not exist"):
        credentials_for("h", tmp_path / "absent")


def test_challenge_is_read() -> None:
    found = read_challenge('Bearer realm="https://t/x?a=b,c",service=s,scope="repository:a:pull,push"')
    assert found is not None
    assert found.scheme == "bearer"
    assert found.parameters == {"realm": "https://t/x?a=b,c", "service": "s", "scope": "repository:a:pull,push"}
    assert read_challenge("Negotiate") is None
    assert re.fullmatch("basic", (read_challenge('Basic realm="x"') or found).scheme)
