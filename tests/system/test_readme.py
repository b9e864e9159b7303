"""README's installation as it is printed, to its end: the first checkpoint, and a doctor that has nothing to say.

The node has no network: packages that are installed already stand in for Debian's archive and for PyPI, and pip looks
nowhere else. The lab has no systemd, by which `kybernate setup` restarts containerd, and no terminal to ask on.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documentation import block
from tests.lab.node import Containerd
from tests.system.cri import Cri
from tests.system.gpu.node import forget_helper

ROOT = Path(__file__).parents[2]
CONFIG, DROP_INS = Path("/etc/containerd/config.toml"), Path("/etc/containerd/conf.d")
PROGRAMS = (Path("/usr/local/bin/kybernate"), Path("/usr/local/bin/containerd-shim-kybernate-v1"))
RESTART = f"env PYTHONPATH={ROOT} {sys.executable} -m tests.lab.node restart"
# pip reads PIP_NO_BUILD_ISOLATION the other way round: "0" is the flag --no-build-isolation.
OFFLINE = {
    "PIP_NO_INDEX": "1",
    "PIP_NO_BUILD_ISOLATION": "0",
    "PIP_NO_CACHE_DIR": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}
SETUP = "kybernate setup containerd"


@pytest.fixture
def fresh() -> Iterator[None]:
    """A node without Kybernate: no package, no programs, no handlers of ours in containerd's configuration."""
    before = CONFIG.read_text()
    CONFIG.write_text("\n\n".join(one for one in before.split("\n\n") if "runtimes.kybernate" not in one) + "\n")
    Containerd().restart()
    subprocess.run(["/opt/kybernate/bin/pip", "uninstall", "-y", "-qq", "kybernate"], check=True)
    for program in PROGRAMS:
        program.unlink()
    yield
    forget_helper()  # which doctor has asked for the driver
    CONFIG.write_text(before)
    shutil.rmtree(DROP_INS, ignore_errors=True)
    Containerd().restart()


def checkout(place: Path) -> Path:
    """Return a copy of the checkout, in which pip may build."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, place)
    for name in ("kybernate", "kybernate_shim"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    return place


def test_installation_of_the_readme(fresh: None, tmp_path: Path) -> None:
    place, environment = checkout(tmp_path), {**os.environ, **OFFLINE}
    for line in block("README.md", "install").commands:
        command = f"{line} --yes --restart '{RESTART}'" if line == SETUP else line
        done = subprocess.run(
            ["sh", "-ec", command], cwd=place, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    findings = json.loads(subprocess.run(["kybernate", "doctor", "-o", "json"], capture_output=True, check=True).stdout)
    assert [one for one in findings if one["verdict"] == "bad"] == []
    assert {"containerd", "handlers", "shim of kybernate", "tier disk", "registry"} <= {
        one["subject"] for one in findings
    }
    cri = Cri()
    with cri.pod() as pod:
        assert cri.exec(cri.run(pod, "c", ["sleep", "1000"]), "echo", "hi") == (0, "hi\n")
    cri.close()
