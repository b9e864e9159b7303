"""Which images a tenant may restore: signed as they are, of his namespace, found by name, in a place of root's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.checkpoint.image.genuine import require_genuine
from kybernate_shim.checkpoint.image.locate import locate
from kybernate_shim.checkpoint.image.manifest import (
    NAME,
    File,
    Host,
    Manifest,
    ManifestInvalid,
    Program,
    Source,
    decode,
    encode,
)
from kybernate_shim.checkpoint.image.requested import Wanted
from kybernate_shim.checkpoint.image.signature import sign, signer_of
from kybernate_shim.checkpoint.image.store import CheckpointNotFound, read_image, write_manifest
from kybernate_shim.config import Config
from kybernate_shim.errors import Refused
from kybernate_shim.trust.keys import Key, KeyRing, rotate, signing_key
from kybernate_shim.trust.requester import NODE, Requester

TENANT = Requester("tenant", "team-a", "pod", "uid", "main")
OTHER = Requester("tenant", "team-b", "pod", "uid", "main")
LOG = structlog.get_logger()
MANIFEST = Manifest(
    id="i",
    time="2026-01-02T03:04:05Z",
    source=Source("c", namespace="team-a"),
    runtime=Program("runc", "1"),
    criu=Program("criu", "4.2"),
    host=Host("6", "x86_64", (), 2, 4096),
)
KEY = Key(b"k" * 32, Path("/k"))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(key_directory=tmp_path / "keys", checkpoint_root=tmp_path / "root")


def made(config: Config, name: str, manifest: Manifest = MANIFEST, *, key: Key | None = None) -> Path:
    """Make an image of one file below the checkpoint root."""
    directory = config.checkpoint_root / name
    directory.mkdir(parents=True, mode=0o700)
    (directory / "f").write_bytes(b"x")
    files = (File("f", 1, "xxh128:0"),) if not manifest.files else manifest.files
    write_manifest(directory, sign(replace(manifest, files=files), key or signing_key(config)), durable=False)
    return directory


def judged(config: Config, directory: Path, requester: Requester = TENANT, **options: bool) -> None:
    require_genuine(read_image(directory), requester, config, LOG, **options)


def test_ones_own_signed_image_is_genuine_for_nobody_else(config: Config) -> None:
    directory = made(config, "team-a/x")
    judged(config, directory)
    with pytest.raises(Refused, match=r"image of namespace team-a, and pod team-b/pod.*Nothing was restored"):
        judged(config, directory, OTHER)
    judged(config, directory, NODE)


def test_an_unsigned_image_is_roots_alone(config: Config) -> None:
    directory = made(config, "team-a/x")
    write_manifest(directory, replace(MANIFEST, files=()), durable=False)
    with pytest.raises(Refused, match=r"not signed.*kybernate import"):
        judged(config, directory)
    judged(config, directory, NODE)


def test_a_key_that_is_gone_signs_no_more(config: Config) -> None:
    directory = made(config, "team-a/x")
    old, _ = rotate(config)
    judged(config, directory)
    assert old is not None
    old.source.unlink()
    with pytest.raises(Refused, match=f"signed by key {old.id}, which is not valid here"):
        judged(config, directory)


@given(st.data())
def test_every_changed_byte_of_a_manifest_is_found(data: st.DataObject) -> None:
    content = bytearray(encode(sign(MANIFEST, KEY)))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    try:
        manifest = decode(bytes(content))
    except ManifestInvalid:
        return
    with pytest.raises(Refused, match=r"sign|digests|belongs to|key"):
        signer_of(bytes(content), manifest, KeyRing((KEY,)))


def test_a_second_value_elsewhere_does_not_help(config: Config) -> None:
    signed = sign(replace(MANIFEST, source=Source("c", pod='"value": "' + "0" * 64 + '"')), KEY)
    assert signer_of(encode(signed), signed, KeyRing((KEY,))) == KEY
    doubled = encode(signed).replace(b'"id"', f'"value": "{signed.signature.value}", "id"'.encode(), 1)
    with pytest.raises(Refused, match=r"sign|digests|belongs to|key"):
        signer_of(doubled, signed, KeyRing((KEY,)))


def test_what_came_from_elsewhere_needs_strong_digests(config: Config, tmp_path: Path) -> None:
    weak, strong = (
        made(config, "team-a/x"),
        made(config, "team-a/y", replace(MANIFEST, files=(File("f", 1, "blake3:0"),))),
    )
    with pytest.raises(Refused, match="detect damage but not forgery"):
        judged(config, weak, carried=True)
    judged(config, strong, carried=True)
    shared = tmp_path / "shared"
    shared.write_text("ab" * 32)
    shared.chmod(0o600)
    config = replace(config, shared_key=shared)
    with pytest.raises(Refused, match="detect damage but not forgery"):
        judged(config, made(config, "team-a/z"))


def test_a_file_that_others_can_write_is_refused(config: Config) -> None:
    directory = made(config, "team-a/x")
    (directory / "f").chmod(0o666)
    with pytest.raises(Refused, match="mode 0666"):
        judged(config, directory)


# -- names ------------------------------------------------------------------------------------------------------------


def located(config: Config, name: str, requester: Requester = TENANT) -> Path:
    return locate(Wanted(name, "annotation x"), requester, config)


def test_a_tenants_name_is_below_his_namespace(config: Config) -> None:
    directory = made(config, "team-a/x/y")
    assert located(config, "x/y") == located(config, str(directory)) == directory
    with pytest.raises(CheckpointNotFound, match="team-b/x/y: no such directory"):
        located(config, "x/y", OTHER)


@pytest.mark.parametrize(
    "name",
    [
        "../team-b/x",
        "x/../../team-b/x",
        "/etc",
        "/",
        "..",
        ".",
        "x/",
        "/x",
        "x//y",
        "x\n",
        "-x",
        "x/.y",
        "é",
        "x\0",
        "a" * 300,
    ],
)
def test_a_name_never_leaves_it(config: Config, name: str) -> None:
    made(config, "team-b/x")
    made(config, "team-a/y")
    with pytest.raises(Refused, match="Nothing was restored"):
        located(config, name)


@pytest.mark.parametrize("namespace", ["", "..", "a/b", "A", "a\n", "-a"])
def test_a_doubtful_namespace_has_no_images(config: Config, namespace: str) -> None:
    with pytest.raises(Refused, match=r"is not the name|names the image by|is a link"):
        located(config, "x", replace(TENANT, namespace=namespace))


def test_a_link_on_the_way_is_refused(config: Config, tmp_path: Path) -> None:
    made(config, "team-a/x")
    (config.checkpoint_root / "team-a/link").symlink_to(tmp_path)
    for name in ("link", "link/root"):
        with pytest.raises(Refused, match="is a link"):
            located(config, name)


@pytest.mark.parametrize("place", ["team-a", "team-a/x"])
def test_a_directory_that_others_can_write_is_refused(config: Config, place: str) -> None:
    made(config, "team-a/x")
    (config.checkpoint_root / place).chmod(0o777)
    with pytest.raises((Refused, Refused), match=r"0777|writ"):
        located(config, "x")


def test_a_path_counts_below_a_trusted_root_only(config: Config, tmp_path: Path) -> None:
    (tmp_path / "other/x").mkdir(parents=True)
    (tmp_path / "other").chmod(0o755)
    with pytest.raises(Refused, match="trusted_roots"):
        located(config, f"{tmp_path}/other/x")
    trusting = replace(config, trusted_roots=(tmp_path / "other",))
    assert located(trusting, f"{tmp_path}/other/x") == tmp_path / "other/x"
    with pytest.raises(Refused, match=r"is not the name|names the image by|is a link"):
        located(trusting, f"{tmp_path}/other/../other/x")


def test_an_image_in_no_namespaces_directory_is_found_and_its_remedy_named(config: Config) -> None:
    made(config, "x")
    assert (config.checkpoint_root / "x" / NAME).exists()
    with pytest.raises(CheckpointNotFound, match=r"kybernate import .*root/x --namespace team-a"):
        located(config, "x")


def test_root_names_what_it_wants(config: Config) -> None:
    assert located(config, "x", NODE) == config.checkpoint_root / "x"
    assert located(config, "/a/../b", NODE) == Path("/a/../b")
