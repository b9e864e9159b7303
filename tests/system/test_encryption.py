"""Encrypted checkpoint images on a node: nothing of the container's memory is on a disk, and restores work as ever."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.image.store import read_image
from kybernate_shim.config import Config
from kybernate_shim.ttrpc import RpcError
from tests.system.checkpoints import (
    COUNT,
    MANIFEST,
    PYTHON,
    Witness,
    assert_no_image,
    counting,
    dumps_sockets,
    failure_of,
    holding,
    in_background,
    kill,
    kybernate,
    refused,
    restored,
    save,
    shim_of,
    small_disk,
)
from tests.system.cri import Cri
from tests.system.ctr import BUSYBOX, Ctr, eventually, run

PLAIN = Path("/run/kybernate/plain")
BIG = 768  # MiB, so that its encryption is long enough to be hit in the middle
COUNTED = 5
# Builds its secret from two halves, so that neither its command line nor the manifest holds it, and has it in memory,
# in a file that it has written, and in a file that it has deleted.
SECRETIVE = """
import os, sys, time
secret = sys.argv[1][::-1].encode()
memory = [secret + bytes(4096) for _ in range(100)]
open("/tmp/written", "wb").write(secret)
deleted = os.open("/tmp/deleted", os.O_CREAT | os.O_RDWR)
os.write(deleted, secret)
os.unlink("/tmp/deleted")
number = 0
while True:
    assert os.pread(deleted, 1000, 0) == secret == memory[50][:len(secret)]
    number += 1
    print(number, flush=True)
    time.sleep(0.05)
"""


def new_key() -> str:
    return os.urandom(32).hex()


class Keys:
    """The node's key file, and the configuration that names it."""

    def __init__(self, config: Path, file: Path) -> None:
        self._config, self._file = config, file
        self.set(new_key())

    def set(self, *keys: str) -> None:
        """Make these the node's keys, which daemons read for each operation."""
        self._file.write_text("".join(f"{key}\n" for key in keys))
        self._file.chmod(0o600)
        self._config.write_text(f'encryption_key = "{self._file}"\n')

    def get(self) -> list[str]:
        return self._file.read_text().split()


@pytest.fixture
def keys(shim_config: Path, tmp_path: Path) -> Keys:
    return Keys(shim_config, tmp_path / "image.key")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "image"
    shutil.rmtree(tmp_path / "image", ignore_errors=True)


def found_in(directory: Path, secret: str) -> list[str]:
    """Return the files that hold the secret."""
    return [path.name for path in directory.iterdir() if secret.encode() in path.read_bytes()]


def assert_encrypted(image: Path) -> None:
    """Whole by every digest; and all its files but manifest and logs are encrypted."""
    kybernate("inspect", "--verify", str(image))
    assert read_image(image).manifest.encryption is not None
    names = {path.name for path in image.iterdir() if path.suffix != ".log"} - {MANIFEST}
    assert names
    assert all(name.endswith(".enc") for name in names), names
    assert not PLAIN.exists()


@contextmanager
def secretive(ctr: Ctr, secret: str) -> Iterator[Witness]:
    with counting(ctr, "python3", "-c", SECRETIVE, secret[::-1], image=PYTHON) as witness:
        yield witness


@pytest.mark.parametrize("leave", [False, True], ids=["exit", "leave-running"])
def test_secret_of_a_container_is_in_no_file_of_its_image(ours: Ctr, keys: Keys, place: Path, leave: bool) -> None:
    secret = f"secret-{os.urandom(16).hex()}"
    with secretive(ours, secret) as witness:
        save(ours, witness.id, place, exit=not leave)
        if leave:
            witness.assert_goes_on()
            assert_whole_at(place)
        assert_encrypted(place)
        assert not found_in(place, secret)
        shutil.copytree(place, place.with_name("plain"))
        kybernate("decrypt", str(place.with_name("plain")))
        assert {"pages-1.img", "kybernate-rootfs-diff.tar"} <= set(found_in(place.with_name("plain"), secret))
        log, counted = witness.log, witness.count()
        if not leave:
            with restored(ours, place, log=log, container_image=PYTHON) as again:
                again.assert_goes_on()
                assert again.count() > counted
                assert not PLAIN.exists()
    shutil.rmtree(place.with_name("plain"))


def assert_whole_at(image: Path) -> None:
    facts = json.loads(kybernate("inspect", "--json", "--verify", str(image)))
    assert facts["verified"] is True
    assert "encrypt" in [step["name"] for step in facts["manifest"]["steps"]]


@pytest.fixture
def image(ours: Ctr, keys: Keys, place: Path) -> Path:
    with counting(ours) as witness:
        save(ours, witness.id, place)
    return place


def assert_not_restored(ours: Ctr, image: Path, *words: str) -> None:
    """Nothing is restored, and the error has all of the words; the check after each test looks for remains."""
    said = refused(
        "ctr", "run", "-d", "--runtime", ours.runtime, "--annotation", f"kybernate.io/restore-from={image}",
        BUSYBOX, id := ours.new_id("r"), "false",
    )  # fmt: skip
    try:
        assert all(word in said for word in words), said
        assert not PLAIN.exists()
    finally:
        ours.remove(id)


def assert_restored(ours: Ctr, image: Path, log: Path) -> None:
    with restored(ours, image, log=log) as witness:
        eventually(lambda: witness.count() > COUNTED)
        assert witness.numbers()[0] > 1
    log.unlink()


def test_image_is_restored_with_its_key_alone(ours: Ctr, keys: Keys, image: Path, tmp_path: Path) -> None:
    (old,) = keys.get()
    key_id = json.loads(kybernate("inspect", "--json", str(image)))["manifest"]["encryption"]["key_id"]
    assert f"encrypted:     key {key_id}" in kybernate("inspect", str(image))
    keys.set(new_key())
    assert_not_restored(ours, image, key_id, "is not in")
    assert key_id in refused("kybernate", "inspect", "--verify", str(image))
    assert f"encrypted:     key {key_id}" in kybernate("inspect", str(image))
    keys.set(new_key(), old)
    assert_restored(ours, image, tmp_path / "log")
    kybernate("encrypt", str(image))  # the first key takes over
    keys.set(keys.get()[0])
    assert_restored(ours, image, tmp_path / "log")
    assert json.loads(kybernate("inspect", "--json", str(image)))["manifest"]["encryption"]["key_id"] != key_id


def test_node_without_a_key_restores_no_encrypted_image(ours: Ctr, keys: Keys, image: Path, shim_config: Path) -> None:
    shim_config.unlink()
    assert_not_restored(ours, image, "encrypted", "set encryption_key")


def flip(image: Path) -> None:
    path = image / "pages-1.img.enc"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap(image: Path) -> None:
    """Exchange two files of the same size."""
    sizes: dict[int, Path] = {}
    for path in sorted(image.glob("*.enc")):
        other = sizes.setdefault(path.stat().st_size, path)
        if other != path:
            content = path.read_bytes()
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)
            return
    raise AssertionError("no two files have the same size")


def cut(image: Path) -> None:
    os.truncate(image / "pages-1.img.enc", 1000)


def test_changed_image_is_not_restored(ours: Ctr, image: Path, tmp_path: Path) -> None:
    for damage, word in ((flip, "pages-1.img"), (swap, "belongs to another file"), (cut, "truncated")):
        copy = tmp_path / damage.__name__
        shutil.copytree(image, copy)
        damage(copy)
        assert_not_restored(ours, copy, word)
        refused("kybernate", "inspect", "--verify", str(copy))


def test_command_line_restores_an_encrypted_image(ours: Ctr, image: Path) -> None:
    id = ours.new_id("r")
    kybernate("restore", str(image), "--detach", "--name", id, "--image", BUSYBOX, "-n", ours.namespace)
    try:
        assert ours.status(id) == "RUNNING"
    finally:
        ours.remove(id)
        ours("snapshot", "rm", id, status=None)


def test_unusable_key_file_refuses_the_checkpoint_and_the_container_goes_on(
    ours: Ctr, keys: Keys, place: Path, tmp_path: Path
) -> None:
    with counting(ours) as witness:
        for mode, wanted in ((0o644, "another user"), (0o600, "no key")):
            (tmp_path / "image.key").write_text("")
            (tmp_path / "image.key").chmod(mode)
            with pytest.raises(RpcError, match=wanted):
                save(ours, witness.id, place)
            assert_no_image(place)
            witness.assert_goes_on()


def encrypting(image: Path) -> None:
    """Wait until the first large file is being encrypted."""
    eventually(lambda: (image / "pages-1.img.enc").exists(), seconds=30, pause=0.001)


def test_killed_daemon_during_encryption_leaves_no_image_and_no_plain_file(ours: Ctr, keys: Keys, place: Path) -> None:
    with holding(ours, BIG) as witness:
        pid, shim = ours.pid(witness.id), shim_of(ours, witness.id)
        with in_background(lambda: save(ours, witness.id, place)) as checkpoint:
            encrypting(place)
            shim.send_signal(signal.SIGSTOP)
            assert list(PLAIN.iterdir())
            assert not (place / MANIFEST).exists()
            kill(shim)
            failure_of(checkpoint)
        eventually(lambda: not Path(f"/proc/{pid}").exists())
        eventually(lambda: ours.status(witness.id) == "")
        assert not (place / MANIFEST).exists()
        assert all(path.suffix in (".enc", ".log") for path in place.iterdir())
        eventually(lambda: not PLAIN.exists())


def test_killed_container_ends_the_encryption(ours: Ctr, keys: Keys, place: Path) -> None:
    with holding(ours, BIG) as witness:
        with in_background(lambda: save(ours, witness.id, place, exit=True)) as checkpoint:
            encrypting(place)
            ours("task", "kill", "-s", "SIGKILL", witness.id)
            assert "killed" in failure_of(checkpoint)
        assert_no_image(place)
        assert not PLAIN.exists()


def test_containerds_own_checkpoint_is_encrypted_and_restored(ours: Ctr, keys: Keys, tmp_path: Path) -> None:
    name, new = f"localhost:5000/checkpoint/{ours.new_id('ck')}:1", ours.new_id("restored")
    secret = f"secret-{os.urandom(16).hex()}"
    # In the environment of the process alone: no file and no configuration holds it.
    loop = "while :; do sleep 0.1; done"
    command = ["sh", "-c", f"export SECRET=$(echo {secret[::-1]} | rev); exec sh -c '{loop}'"]
    look = ["sh", "-c", "cat /proc/[0-9]*/environ"]
    with ours.running(*command) as id:
        eventually(lambda: secret in ours.exec(id, *look))
        ours("container", "checkpoint", "--task", id, name)
    try:
        content = Path("/var/lib/containerd/io.containerd.content.v1.content/blobs")
        assert not [path for path in content.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
        ours("container", "restore", "--live", new, name)
        try:
            assert ours.status(new) == "RUNNING"
            assert secret in ours.exec(new, *look)
        finally:
            ours.remove(new)
            run(["sh", "-c", "rm -rf /tmp/ctrd-checkpoint*"])  # containerd never removes them
    finally:
        ours("images", "rm", "--sync", name, status=None)


@pytest.fixture
def cri() -> Iterator[Cri]:
    client = Cri(handler="kybernate")
    yield client
    client.close()


@pytest.fixture
def pods_image() -> Iterator[Path]:
    """The directory of an image that pods of the namespace `default` know by its last part."""
    path = Config().checkpoint_root / "default" / "encrypted"
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_pod_is_restored_from_an_encrypted_image(cri: Cri, keys: Keys, pods_image: Path) -> None:
    with cri.pod() as pod:
        cri.run(pod, "counter", COUNT)
        cri.await_log(pod, "counter", str(COUNTED))
        run(["kybernate", "checkpoint", f"default/{pod.config.metadata.name}", str(pods_image), "--exit"])
        last = int(cri.log(pod, "counter")[-1])
    assert_encrypted(pods_image)
    with cri.pod(annotations={"kybernate.io/restore-from": pods_image.name}) as pod:
        cri.run(pod, "counter", ["/never/run"])
        assert int(cri.await_log(pod, "counter", str(last + COUNTED))[0]) == last + 1


def archived(cri: Cri, archive: Path) -> bool:
    """Have CRI write a counter's archive, where it writes any."""
    cri.pull(BUSYBOX)  # containerd looks the base image up by its digest in the registry
    with cri.pod() as pod:
        id = cri.run(pod, "counter", COUNT)
        cri.await_log(pod, "counter", str(COUNTED))
        return cri.checkpoint(id, archive)


def test_archive_of_cri_holds_encrypted_files(cri: Cri, keys: Keys, tmp_path: Path) -> None:
    archive = tmp_path / "checkpoint.tar"
    if not archived(cri, archive):
        return
    with tarfile.open(archive) as tar:
        names = {name.removeprefix("./") for name in tar.getnames()}
    assert {"checkpoint/kybernate-manifest.json", "checkpoint/pages-1.img.enc"} <= names
    assert "checkpoint/pages-1.img" not in names


def test_cri_restores_an_encrypted_archive(cri: Cri, cri_restore: None, keys: Keys, tmp_path: Path) -> None:
    archive = tmp_path / "checkpoint.tar"
    archived(cri, archive)
    with cri.pod() as pod:
        id = cri.create(pod, "counter", [], image=str(archive))
        cri.start(id)
        assert int(eventually(lambda: cri.log(pod, "counter"))[-1]) > 0
        assert cri.exec(id, "echo", "hello") == (0, "hello\n")


# Is connected to a server, which sends it words, and holds memory that no process has mapped: nothing foresees it.
CONNECTED = """
import os, socket, sys
file = os.memfd_create("unseen")
for _ in range(100): os.write(file, os.urandom(1 << 20))
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
for number in range(1, 6):
    print(number, flush=True)
while word := peer.recv(100):
    peer.sendall(word)
"""
SAID = b"word"


def assert_answers(peer: socket.socket) -> None:
    peer.sendall(SAID)
    assert peer.recv(100) == SAID


def test_full_disk_keeps_a_container_that_was_to_end_with_its_connections(ours: Ctr, keys: Keys, place: Path) -> None:
    """CRIU itself is to end it, so that its peers hear nothing: by then the encrypted image must be whole."""
    if not dumps_sockets():
        pytest.skip("CRIU before 4.2 dumps no network sockets on this kernel")
    with socket.create_server(("127.0.0.1", 0)) as server, small_disk(place.parent / "disk", 90) as disk:
        command = ["python3", "-c", CONNECTED, str(server.getsockname()[1])]
        network = ["--net-host"]
        with counting(ours, *command, image=PYTHON, flags=network) as witness:
            peer, _ = server.accept()
            peer.settimeout(60)
            assert_answers(peer)
            said = refused("kybernate", "checkpoint", witness.id, str(disk / "image"), "--exit", "--tcp", "established")
            assert "No space left on device" in said
            assert "continues as before" in said
            assert not (disk / "image").exists()
            assert not PLAIN.exists()
            assert_answers(peer)
            kybernate("checkpoint", witness.id, str(place), "--exit", "--tcp", "established")
            assert_encrypted(place)
            eventually(lambda: ours.status(witness.id) in ("STOPPED", ""))
            flags = [*network, "--annotation", "kybernate.io/tcp=established"]
            with restored(ours, place, log=witness.log, container_image=PYTHON, flags=flags):
                assert_answers(peer)
