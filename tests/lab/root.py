"""Builds the root of a lane's nodes: Debian's packages, the project's dependencies, images, fixed settings."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

from tests.lab import host, images, oci, wheels
from tests.lab.failure import LabFailed, check
from tests.lab.mirror import mirror
from tests.lab.suites import PACKAGES, Suite

VENV = "/opt/kybernate"
ARCHIVES = Path("usr/share/lab/images")
REGISTRY_STORAGE = Path("var/lib/docker-registry")
SHAPED_BY = ("root.py", "suites.py", "images.py", "debian.py", "oci.py", "wheels.py")
UNUSED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info")
# Nothing of the caller's environment, such as a virtual environment or a locale, may reach a program in the root.
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}

SETTINGS = {
    "etc/hostname": "lab\n",
    "etc/hosts": "127.0.0.1 localhost lab\n::1 localhost\n",
    "etc/resolv.conf": "# A node has no name server.\n",
    "etc/cni/net.d/10-lab.conflist": json.dumps({
        "cniVersion": "1.0.0", "name": "lab",
        "plugins": [{
            "type": "bridge", "bridge": "cni0", "isGateway": True,
            "ipam": {
                "type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}]], "routes": [{"dst": "0.0.0.0/0"}],
            },
        }],
    }, indent=2),
    "etc/lab/registry.yml": f"""version: 0.1
log: {{level: warn, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: /{REGISTRY_STORAGE}}}
  delete: {{enabled: true}}
http: {{addr: "127.0.0.1:5000"}}
""",
}  # fmt: skip


def identity(suite: Suite, checkout: Path) -> str:
    """Return a short hash of all that shapes a suite's root: its definition here and the project's dependencies."""
    parts = [suite.name, platform.machine(), *wheels.requirements(checkout)]
    parts += [_bare_code(checkout / "tests/lab" / name) for name in SHAPED_BY]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _bare_code(path: Path) -> str:
    """Return a module's code without comments, docstrings and layout, whose change is no reason for a new root."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def build(suite: Suite, checkout: Path, root: Path) -> None:
    """Build the suite's root in `root`, an empty directory. Raises LabFailed; `root` is then to be thrown away."""
    host.provide_tools()
    _install_packages(suite, root)
    _install_wheels(wheels.requirements(checkout), root)
    for path, text in SETTINGS.items():
        _write(root / path, text)
    archives = root / ARCHIVES
    archives.mkdir(parents=True)
    for image in images.build(root):
        oci.write_archive(image, archives / f"{image.name}.tar")
        oci.write_registry(image, root / REGISTRY_STORAGE)


def _install_packages(suite: Suite, root: Path) -> None:
    """Fill `root` by mmdebstrap, without documentation and translations."""
    options = ["--mode=root", "--variant=minbase", f"--keyring={host.KEYRING}", f"--include={','.join(PACKAGES)}"]
    options += [f"--dpkgopt=path-exclude=/{path}/*" for path in UNUSED]
    if suite.rolling:
        options.append('--aptopt=Acquire::Check-Valid-Until "false"')
    # In namespaces of its own, so that all its processes and mounts end with it, and an unfinished root can be removed.
    alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    check([*alone, "mmdebstrap", *options, suite.name, root, mirror()])


def _install_wheels(wanted: list[str], root: Path) -> None:
    """Make the project's virtual environment in `root`, with all that the project needs but not the project."""
    version = _output(root, "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    wheelhouse = root / "tmp/wheels"
    wheels.download(wanted, version, wheelhouse)
    _chroot(root, "python3", "-m", "venv", VENV)
    pip = (f"{VENV}/bin/python", "-m", "pip", "install", "--no-index", "--no-cache-dir", "-qq")
    _chroot(root, *pip, "--find-links=/tmp/wheels", *wanted)
    shutil.rmtree(wheelhouse)


def _chroot(root: Path, *argv: str) -> None:
    check([_tool("chroot"), root, *argv], env=ENVIRONMENT)


def _output(root: Path, *argv: str) -> str:
    done = subprocess.run(
        [_tool("chroot"), root, *argv], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise LabFailed(f"{argv[0]} in the new root ended with status {done.returncode}")
    return done.stdout.strip()


def _tool(name: str) -> str:
    """Return the full path of a system tool, which the caller's PATH may lack."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{ENVIRONMENT['PATH']}") or name


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(text)
