"""`kybernate inspect` on images that are whole, and on damaged ones."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from kybernate.node import verdict
from kybernate_shim.checkpoint.image import digests, store
from kybernate_shim.checkpoint.image.codec import to_json
from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.checkpoint.image.store import Problem
from kybernate_shim.trust.keys import Key
from tests.unit.cli.conftest import Node
from tests.unit.cli.saved_image import save


def test_image_is_shown(node: Node) -> None:
    save(node.checkpoints / "i")
    shown = node.run("inspect", "i").stdout
    for line in (
        "container:     counter",
        "made:          2026-11-21T05:00:00.000Z on here",
        "memory:        3.00 MiB",
        "VRAM:          1.00 GiB",
        "VRAM bytes:    in CRIU's files (process 7 is traced)",
        "  7     helper   2.00 MiB",
        "  7     unknown",
        "  GPU-1   NVIDIA H200   1.00 GiB",
        "  GPU-1   used",
        "  2 GPUs, used or not: the driver requires a target for each",
        "  /data         ext4   host     /srv/data",
        "  dump   1.50 s   4.00 KiB",
        "  pages-1.img           16.0 KiB",
        "  container image busybox:1",
        "  a NVIDIA H200 with 1.00 GiB of free VRAM, driver 580.1",
        "  mounts at /data",
    ):
        assert line in shown.splitlines(), f"{line!r} is not in\n{shown}"


def test_image_as_json(node: Node) -> None:
    manifest = save(node.checkpoints / "i")
    assert node.json("inspect", "i") == {
        "path": str(node.checkpoints / "i"),
        "bytes": manifest.bytes,
        "memory_bytes": 3 << 20,
        "vram_bytes": 1 << 30,
        "verified": None,
        "problems": [],
        "signature": {"key": manifest.signature.key, "valid": True, "problem": ""},
        "manifest": to_json(manifest),
    }


def test_image_that_cannot_be_restored_is_a_problem(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    save(node.checkpoints / "i")
    problem = Problem("files.img", "not restorable", "'/f' is open, and is gone")
    monkeypatch.setattr(verdict, "unrestorable", lambda place, manifest: [problem])
    shown = node.run("inspect", "i", "--verify", status=1)
    assert "'/f' is open, and is gone" in shown.stdout


def test_whole_image_is_verified(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "unrestorable", lambda place, manifest: [])  # CRIU has not written it
    save(node.checkpoints / "i")
    verified = "verified: 3 files are unchanged, and the signature is valid here\n"
    assert node.run("inspect", "i", "--verify").stdout.endswith(verified)
    assert node.json("inspect", "i", "--verify")["verified"] is True


def another_word(content: bytes) -> bytes:
    return content.replace(b"busybox:1", b"busybox:2")


def another_key(content: bytes) -> bytes:
    return re.sub(rb'"key": "[^"]+"', b'"key": "0000"', content)


def no_signature(content: bytes) -> bytes:
    return re.sub(rb'"(key|value)": "[^"]+"', rb'"\1": ""', content)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (another_word, "does not match: the manifest was changed after it was signed"),
        (another_key, "signed by key 0000, which is not valid here"),
        (no_signature, "is not signed"),
    ],
)
@pytest.mark.parametrize("damaged", [False, True])
def test_last_line_and_status_say_the_worst(
    node: Node, monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes], reason: str, damaged: bool
) -> None:
    monkeypatch.setattr(verdict, "unrestorable", lambda place, manifest: [])
    save(node.checkpoints / "i")
    manifest = node.checkpoints / "i" / NAME
    manifest.write_bytes(change(manifest.read_bytes()))
    if damaged:
        flip(node.checkpoints / "i" / "pages-1.img")
    shown = node.run("inspect", "i", "--verify", status=1)
    assert "verified" not in shown.stdout
    assert reason in shown.stdout
    last = shown.stderr.splitlines()[-1]
    assert ("is damaged and cannot be restored: 2 problems" if damaged else reason) in last
    found = node.json("inspect", "i", "--verify", status=1)
    assert (found["verified"], found["problems"][0]["kind"]) == (False, "signature")
    assert len(found["problems"]) == (2 if damaged else 1)


def test_signature_that_cannot_be_checked_is_none(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "unrestorable", lambda place, manifest: [])
    save(node.checkpoints / "i", key=Key(b"k" * 32, tmp_path / "k"))
    (tmp_path / "keys").write_text("not a directory")
    assert "not checked: the keys in" in node.run("inspect", "i", "--verify", status=1).stderr


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (flip, "changed"),
        (Path.unlink, "missing"),
        (lambda path: path.write_bytes(b"x"), "truncated"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "longer"),
    ],
)
def test_damage_is_found(node: Node, damage: Callable[[Path], object], kind: str) -> None:
    save(node.checkpoints / "i")
    damage(node.checkpoints / "i" / "pages-1.img")
    result = node.run("inspect", "i", "--verify", status=1)
    assert "cannot be restored" in result.stderr
    assert result.stdout.splitlines()[1].split()[:2] == ["pages-1.img", kind]
    problems = node.json("inspect", "i", "--verify", status=1)["problems"]
    assert [(problem["file"], problem["kind"]) for problem in problems] == [("pages-1.img", kind)]


def test_missing_file_is_told_without_verify(node: Node) -> None:
    save(node.checkpoints / "i")
    (node.checkpoints / "i" / "core-1.img").unlink()
    assert "core-1.img: missing" in node.run("inspect", "i", status=1).stderr


def denied(*_: object, **__: object) -> NoReturn:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize("flags", [(), ("--verify",)])
def test_manifest_that_the_user_may_not_read_is_not_damaged(
    node: Node, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    save(node.checkpoints / "i")
    monkeypatch.setattr(store, "read_plain", denied)
    told = node.run("inspect", "i", *flags, status=1).stderr
    assert "no permission to read the checkpoint image" in told
    assert "run as root" in told
    assert "damaged" not in told


def test_files_that_the_user_may_not_read_are_not_damaged(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    save(node.checkpoints / "i")
    monkeypatch.setattr(digests.Digester, "digest", denied)
    told = node.run("inspect", "i", "--verify", status=1).stderr
    assert "this user may not read" in told
    assert "damaged" not in told


@pytest.mark.parametrize("flags", [(), ("--verify",)])
def test_broken_manifest_is_told(node: Node, flags: tuple[str, ...]) -> None:
    save(node.checkpoints / "i")
    (node.checkpoints / "i" / NAME).write_text('{"version": 99}')
    assert "damaged checkpoint image" in node.run("inspect", "i", *flags, status=1).stderr


@pytest.mark.parametrize("flags", [(), ("--verify",)])
def test_missing_image_is_told(node: Node, flags: tuple[str, ...]) -> None:
    result = node.run("inspect", "nothing", *flags, status=3)
    assert f"{node.checkpoints}/nothing: no such directory" in result.stderr


def test_directory_beside_us_is_hinted_at(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert "did you mean ./mine?" in node.run("inspect", "mine", status=3).stderr
    node.run("inspect", "./mine")


def test_signer_is_shown(node: Node) -> None:
    id = save(node.checkpoints / "i").signature.key
    assert f"signature:     key {id} (node key), valid here" in node.run("inspect", "i").stdout.splitlines()


def test_image_that_no_key_signed_says_so(node: Node) -> None:
    save(node.checkpoints / "i", signed=False)
    assert "signature:     not signed" in node.run("inspect", "i").stdout.splitlines()
    assert node.json("inspect", "i")["signature"] == {"key": "", "valid": False, "problem": "the image is not signed"}


def test_changed_manifest_is_shown_as_such(node: Node) -> None:
    save(node.checkpoints / "i")
    text = (node.checkpoints / "i" / NAME).read_text()
    (node.checkpoints / "i" / NAME).write_text(text.replace("busybox:1", "busybox:2"))
    assert "was changed after it was signed" in node.run("inspect", "i").stdout


def test_image_of_a_pod_is_found_by_its_name_and_by_its_namespace(node: Node) -> None:
    save(node.checkpoints / "shop" / "i", pod="front", namespace="shop")
    assert node.json("inspect", "i")["path"] == str(node.checkpoints / "shop" / "i")
    assert node.json("inspect", "shop/i")["path"] == str(node.checkpoints / "shop" / "i")


def test_ambiguous_name_is_listed(node: Node) -> None:
    save(node.checkpoints / "shop" / "i", pod="front", namespace="shop")
    save(node.checkpoints / "i")
    result = node.run("inspect", "i", status=4)
    places = f"  {node.checkpoints}/i\n  {node.checkpoints}/shop/i"
    assert f"'i' is the name of 2 checkpoint images:\n{places}" in result.stderr
    assert "name one of them by its place" in result.stderr
    for place in ("shop/i", node.checkpoints / "i"):
        assert str(node.json("inspect", str(place))["path"]).endswith(str(place))


def test_image_is_found_by_its_id(node: Node) -> None:
    save(node.checkpoints / "one")
    assert node.json("inspect", "3f6b")["path"] == str(node.checkpoints / "one")
    save(node.checkpoints / "two")
    assert "is the name of 2 checkpoint images" in node.run("inspect", "3f6b", status=4).stderr


def test_relative_path_and_a_namespace_are_told_apart(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(node.checkpoints / "shop" / "i", pod="front", namespace="shop")
    save(tmp_path / "shop" / "i")
    monkeypatch.chdir(tmp_path)
    assert "'shop/i' is the name of 2 checkpoint images" in node.run("inspect", "shop/i", status=4).stderr
    assert node.json("inspect", "./shop/i")["path"] == str(tmp_path / "shop" / "i")
    assert node.json("inspect", str(node.checkpoints / "shop/i"))["path"] == str(node.checkpoints / "shop" / "i")


def test_names_in_an_image_cannot_act_on_the_terminal(node: Node) -> None:
    save(node.checkpoints / "i", image="busybox\x1b[2J\u202e\nsignature: key 1, valid here")
    shown = node.run("inspect", "i").stdout
    assert "busybox\\x1b[2J\\u202e\\nsignature: key 1, valid here" in shown
    assert "\x1b" not in shown


def test_image_is_shown_where_the_keys_cannot_be_listed(node: Node, tmp_path: Path) -> None:
    save(node.checkpoints / "i", key=Key(b"k" * 32, tmp_path / "k"))
    (tmp_path / "keys").write_text("not a directory")
    assert "signature:     not checked: the keys in" in node.run("inspect", "i").stdout
    assert node.json("inspect", "i")["signature"]["valid"] is False
    assert "cannot be listed" in node.run("images", status=4).stderr


@pytest.mark.parametrize("command", [("inspect",), ("import",), ("store", "put"), ("export",)], ids=" ".join)
def test_word_that_is_too_long_for_a_name_is_no_defect(node: Node, command: tuple[str, ...]) -> None:
    flags = ("out",) if command == ("export",) else ()
    result = node.attempt(*command, "☃" * 700, *flags)
    told = result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert told.startswith("kybernate: ")
    assert "unexpected error" not in told
