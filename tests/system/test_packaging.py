"""What the README tells an administrator to do with containerd's configuration, done to that of Debian's package."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.node import Containerd
from tests.system.cri import Cri
from tests.system.ctr import run

PACKAGING = Path(__file__).parents[2] / "packaging" / "containerd"
CONFIG = Path("/etc/containerd/config.toml")
DROP_INS = Path("/etc/containerd/conf.d")
DEBIANS = """version = 2

[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    [plugins."io.containerd.grpc.v1.cri".cni]
      bin_dir = "/usr/lib/cni"
      conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.internal.v1.opt"]
    path = "/var/lib/containerd/opt"
"""


@pytest.fixture
def config() -> Iterator[Path]:
    """containerd's configuration; the lab's own is back afterwards, and containerd runs with it."""
    before = CONFIG.read_text()
    yield CONFIG
    CONFIG.write_text(before)
    shutil.rmtree(DROP_INS, ignore_errors=True)
    Containerd().restart()


def is_1() -> bool:
    return run(["containerd", "--version"]).split()[2].startswith("1.")


def install(config: Path) -> None:
    """Do what the README says for this version of containerd."""
    if is_1():
        whole = run(["containerd", "config", "dump"])
        config.write_text(whole + (PACKAGING / "kybernate-1.7.toml").read_text())
    else:
        DROP_INS.mkdir(exist_ok=True)
        shutil.copy(PACKAGING / "kybernate-2.toml", DROP_INS / "kybernate.toml")
        if tomllib.loads(config.read_text())["version"] < 3:
            lines = run(["containerd", "config", "migrate"]).splitlines(keepends=True)
            config.write_text("".join(line for line in lines if not line.startswith("imports")))
        if "imports" not in tomllib.loads(config.read_text()):
            config.write_text(f'imports = ["{DROP_INS}/*.toml"]\n{config.read_text()}')


def dumped() -> dict[str, Any]:
    """Return CRI's settings as containerd has understood them."""
    plugins = tomllib.loads(run(["containerd", "config", "dump"]))["plugins"]
    settings: dict[str, Any] = plugins["io.containerd.grpc.v1.cri" if is_1() else "io.containerd.cri.v1.runtime"]
    return settings


def test_debians_configuration_keeps_all_that_it_had(config: Path) -> None:
    config.write_text(DEBIANS)
    before = dumped()
    install(config)
    later = dumped()
    added = later["containerd"]["runtimes"].pop("kybernate")
    assert added["runtime_path"] == "/usr/local/bin/containerd-shim-kybernate-v1"
    assert added["pod_annotations"] == ["kybernate.io/*"]
    assert later == before


def test_pod_runs_under_the_installed_runtime(config: Path) -> None:
    """The lab's own configuration has a runtime of that name, of another type; the packaged one takes its place."""
    lines = config.read_text().split("\n\n")
    config.write_text("\n\n".join(table for table in lines if "runtimes.kybernate]" not in table))
    assert "kybernate" not in dumped()["containerd"]["runtimes"]
    install(config)
    Containerd().restart()
    cri = Cri()
    with cri.pod() as pod:
        id = cri.run(pod, "c", ["sleep", "1000"])
        assert cri.exec(id, "echo", "hi") == (0, "hi\n")
        shims = {path.read_text().strip() for path in Path("/proc").glob("[0-9]*/comm") if path.exists()}
        assert "kybernate-shim" in shims
    cri.close()
