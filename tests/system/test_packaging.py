"""What the manual has an administrator do with containerd's configuration, done to that of Debian's package."""

from __future__ import annotations

import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.documentation import Block, block
from tests.fakes.documented import CTR
from tests.lab.node import Containerd
from tests.system.cri import Cri
from tests.system.ctr import BUSYBOX, Ctr, containerd_version, eventually, run

pytestmark = pytest.mark.as_root("the commands are the documentation's, with whatever user the image has")
PACKAGING = Path(__file__).parents[2] / "packaging" / "containerd"
CONFIG = Path("/etc/containerd/config.toml")
DROP_INS = Path("/etc/containerd/conf.d")
PUBLIC = "docker.io/library/busybox:latest"
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
    return containerd_version() < (2, 0)


def install(config: Path) -> None:
    """Execute what the manual says for this version of containerd; the lab has no systemd to restart it by."""
    if is_1():
        execute(block("docs/installation.md", "containerd-1.7"))
        return
    if tomllib.loads(config.read_text())["version"] < 3:
        execute(block("docs/installation.md", "containerd-2-migrate"))
    execute(block("docs/installation.md", "containerd-2"))


def execute(commands: Block) -> None:
    lines = [line for line in commands.commands if not line.startswith("systemctl")]
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "packaging").symlink_to(PACKAGING.parent)
        run(["sh", "-exc", f"cd {scratch}\n" + "\n".join(lines)])


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


def test_first_checkpoint_of_the_readme(tmp_path: Path) -> None:
    """The lab's registry stands in for the public one."""
    lines = block("README.md", "first-checkpoint").commands
    names = ("counter", "counter-2")
    images = Path("/var/lib/kybernate/checkpoints")
    log = tmp_path / "counter.log"
    ctr = Ctr()
    try:
        for line in lines[1:]:
            run(["sh", "-exc", line.replace(PUBLIC, BUSYBOX).replace("/tmp/counter.log", str(log))])
        before = len(log.read_text().splitlines())
        eventually(lambda: len(log.read_text().splitlines()) > before)
        counted = [int(line) for line in log.read_text().split()]
        assert counted == sorted(set(counted))
        assert Ctr().status("counter-2") == "RUNNING"
    finally:
        for name in names:
            ctr.remove(name)
            ctr("snapshot", "rm", name, status=None)
        shutil.rmtree(images / "first", ignore_errors=True)


def test_ctr_has_what_the_documentation_uses() -> None:
    for command, flags in CTR.items():
        text = run(["ctr", *command, "--help"])
        for flag in flags:
            assert re.search(rf"(^|[\s,]){re.escape(flag)}\b", text, re.MULTILINE), f"ctr {command}: {flag}"
