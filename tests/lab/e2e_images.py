"""The images that Kubernetes' end-to-end tests name, made of Debian's packages and of the tests' own programs.

They stand in for those of registry.k8s.io, in the storage of an image registry of their own, under the names and
versions that the tests ask for. Most of them differ in what they run and not in their content, so they share a layer,
which a node unpacks once.
"""

from __future__ import annotations

import io
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lab import host, oci
from tests.lab.failure import check
from tests.lab.mirror import mirror
from tests.lab.suites import TRIXIE

STORAGE = Path("var/lib/e2e-registry")
PROGRAMS = Path("usr/local/lib/e2e-images")
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROJECT = "e2e-test-images"
PACKAGES = (
    "bind9-dnsutils", "bind9-host", "ca-certificates", "curl", "iproute2", "iputils-ping", "netcat-openbsd",
    "nginx-light", "procps", "socat", "wget",
)  # fmt: skip
UNUSED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info")
SKIPPED = ("output/dev", "output/mknod")  # a container has devices of its own
# The programs of the shared layer, and the directory of each.
PLACES = {"agnhost": ".", "sample-apiserver": ".", "etcd": "usr/local/bin", "nnp": "usr/local/bin"}
# The users are those that specs expect. nginx writes its log where `kubectl logs` reads it.
FINISH = r"""
cd "$1"
cp --archive "$staged/." .
chmod 4755 usr/local/bin/nnp
echo user-defined-in-image:x:1000:1000::/:/bin/sh >> etc/passwd
printf '%s\n' user-defined-in-image:x:1000: group-defined-in-image:x:50000:user-defined-in-image >> etc/group
ln --symbolic agnhost agnhost-2
mkdir uploads
rm --force --recursive etc/resolv.conf etc/hostname var/lib/apt/lists var/cache/apt
ln --symbolic --force /dev/stdout var/log/nginx/access.log
ln --symbolic --force /dev/stderr var/log/nginx/error.log
"""
FOUND = re.compile(r'Config\{list\.\w+, "([^"]+)", "([^"]+)"\}')
# A spec looks for this word in an image that is mounted as a volume.
OS_RELEASE = b'NAME="Alpine Linux"\n'


@dataclass(frozen=True)
class Content:
    """What an image runs, and its layer: all of Debian's packages, agnhost alone, or agnhost with a picture."""

    layer: str
    config: Mapping[str, Any] = field(default_factory=dict)


AGNHOST = {"Entrypoint": ["/agnhost"], "Cmd": ["pause"], "Env": [PATH]}
IMAGES = {
    f"{PROJECT}/agnhost": Content("debian", AGNHOST),
    f"{PROJECT}/glibc-dns-testing": Content("debian", {"Cmd": ["bash"], "Env": [PATH]}),
    f"{PROJECT}/nginx": Content("debian", {"Cmd": ["nginx", "-g", "daemon off;"], "Env": [PATH]}),
    f"{PROJECT}/nonewprivs": Content("debian", {"Cmd": ["nnp"], "Env": [PATH]}),
    f"{PROJECT}/nonroot": Content("debian", {"Cmd": ["bash"], "Env": [PATH], "User": "1234"}),
    f"{PROJECT}/sample-apiserver": Content("debian", {"Entrypoint": ["/sample-apiserver"], "Env": [PATH]}),
    "etcd": Content("debian", {"Cmd": ["/usr/local/bin/etcd"], "Env": [PATH]}),
    "pause": Content("agnhost", {"Entrypoint": ["/agnhost", "pause"], "User": "65535:65535", "Env": [PATH]}),
    f"{PROJECT}/kitten": Content("kitten", {**AGNHOST, "Cmd": ["test-webserver"]}),
    f"{PROJECT}/nautilus": Content("nautilus", {**AGNHOST, "Cmd": ["test-webserver"]}),
}


def build(into: Path, module: Path) -> None:
    """Put all images into the registry's storage below `into`, whose programs they are made of.

    `module` is the source of Kubernetes, of which some files belong to the images.
    """
    host.provide_tools()
    programs = into / PROGRAMS
    agnhost = (programs / "agnhost").read_bytes()
    layers = {
        "agnhost": _layer({"agnhost": agnhost}),
        "debian": _debian(programs, module),
        "kitten": _layer({"agnhost": agnhost, **_picture("kitten", module)}),
        "nautilus": _layer({"agnhost": agnhost, **_picture("nautilus", module)}),
    }
    for name, version in versions(module):
        if content := IMAGES.get(name):
            image = oci.image(name, layers[content.layer], **content.config)
            oci.write_registry(image, into / STORAGE)
            tags = into / STORAGE / "docker/registry/v2/repositories" / name / "_manifests/tags"
            shutil.copytree(tags / "latest", tags / version)
    shutil.rmtree(programs)


def versions(module: Path) -> Iterator[tuple[str, str]]:
    """Yield name and version of each image that the tests may ask for, the name as its registry here has it."""
    text = (module / "test/utils/image/manifest.go").read_text()
    for name, version in FOUND.findall(text):
        yield (name if name in IMAGES else f"{PROJECT}/{name}"), version


def _debian(programs: Path, module: Path) -> bytes:
    """Return a layer of Debian's packages with the programs, and the images that agnhost's own registry serves."""
    with tempfile.TemporaryDirectory() as scratch:
        staged, finish, layer = Path(scratch, "staged"), Path(scratch, "finish"), Path(scratch, "layer.tar")
        (staged / "usr/local/bin").mkdir(parents=True)
        for name, place in PLACES.items():
            shutil.copy(programs / name, staged / place)
        for name in ("localhost.crt", "localhost.key"):
            shutil.copy(module / "test/images/agnhost/porter" / name, staged)
        pause = _layer({"agnhost": (programs / "agnhost").read_bytes()})
        _write_served(oci.image("pause", pause, **IMAGES["pause"].config), staged / "var/registry/pause")
        finish.write_text(f"set -e\nstaged={staged}\n{FINISH}")
        options = ["--mode=root", "--variant=minbase", f"--keyring={host.KEYRING}", f"--include={','.join(PACKAGES)}"]
        options += [f"--dpkgopt=path-exclude=/{path}/*" for path in UNUSED]
        options += [f"--skip={step}" for step in SKIPPED]
        alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        hook = f'--customize-hook=sh {finish} "$1"'
        check([*alone, "mmdebstrap", *options, hook, TRIXIE.name, layer, mirror()])
        return layer.read_bytes()


def _picture(name: str, module: Path) -> dict[str, bytes]:
    """Return the files of an image that serves a picture."""
    pictures = module / "test/images" / name / "html"
    return {**{path.name: path.read_bytes() for path in sorted(pictures.iterdir())}, "etc/os-release": OS_RELEASE}


def _layer(files: Mapping[str, bytes]) -> bytes:
    """Return a layer of executable files."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in files.items():
            oci.add(tar, name, data, mode=0o755)
    return layer.getvalue()


def _write_served(image: oci.Image, storage: Path) -> None:
    """Write an image where agnhost's registry serves it, with the one tag that specs pull."""
    for blob in image.blobs:
        kind = "manifests" if blob is image.manifest else "blobs"
        path = storage / kind / "sha256" / blob.hex[:2] / blob.hex / "data"
        path.parent.mkdir(parents=True)
        path.write_bytes(blob.data)
    (storage / "manifests/testing").write_text(image.manifest.digest)
