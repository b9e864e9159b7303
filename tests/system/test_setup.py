"""`kybernate setup containerd` with the containerd of this node, and with what goes wrong on the way."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.documentation import block
from tests.lab.node import Containerd
from tests.system.cri import Cri
from tests.system.ctr import containerd_version, run
from tests.system.leftovers import Snapshot, assert_nothing_left

CONFIG = Path("/etc/containerd/config.toml")
DROP_INS = Path("/etc/containerd/conf.d")
RESTART = f"env PYTHONPATH={Path(__file__).parents[2]} {sys.executable} -m tests.lab.node restart"
CRI_2, CRI_3 = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"


@pytest.fixture
def bare() -> Iterator[Path]:
    """containerd's configuration without our handlers; the lab's own is back afterwards."""
    before = CONFIG.read_text()
    tables = before.split("\n\n")
    CONFIG.write_text("\n\n".join(one for one in tables if "runtimes.kybernate" not in one) + "\n")
    Containerd().restart()
    yield CONFIG
    CONFIG.write_text(before)
    shutil.rmtree(DROP_INS, ignore_errors=True)
    Containerd().restart()


def setup(*flags: str, restart: str = RESTART, status: int = 0) -> subprocess.CompletedProcess[str]:
    argv = ["kybernate", "setup", "containerd", "--restart", restart, *flags]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def texts() -> dict[str, str]:
    return {str(path): path.read_text() for path in (CONFIG, *sorted(DROP_INS.glob("*")))}


def handlers() -> dict[str, Any]:
    plugins = tomllib.loads(run(["containerd", "config", "dump"]))["plugins"]
    found: dict[str, Any] = plugins[CRI_2 if containerd_version() < (2, 0) else CRI_3]["containerd"]["runtimes"]
    return found


def test_handler_is_added_and_serves_pods(bare: Path) -> None:
    before, others = Snapshot.take(), handlers()
    shown = setup("--dry-run").stdout
    assert "+runtime_type" in shown.replace(" ", "")
    assert handlers() == others, "a dry run changes nothing"
    pid = Containerd().pid
    setup("--yes")
    assert Containerd().pid != pid
    assert {name: value for name, value in handlers().items() if name != "kybernate"} == others
    cri = Cri()
    with cri.pod() as pod:
        id = cri.run(pod, "c", ["sleep", "1000"])
        assert cri.exec(id, "echo", "hi") == (0, "hi\n")
    cri.close()
    written, pid = texts(), Containerd().pid
    again = json.loads(setup("--yes", "--json").stdout)
    assert (again["changed"], again["restarted"], again["verified"]) == ([], False, True)
    assert (texts(), Containerd().pid) == (written, pid), "a second time only verifies"
    assert_nothing_left(before)


def test_commands_of_the_manual(bare: Path) -> None:
    """The lab has no systemd, which the commands restart containerd by, and no terminal to ask on."""
    dry, wet = block("docs/installation.md", "setup").commands
    assert "+runtime_type" in run(dry.split()).replace(" ", "")
    run([*wet.split(), "--yes", "--restart", RESTART])
    assert "kybernate" in handlers()


def test_containers_run_on_meanwhile(bare: Path) -> None:
    cri = Cri(handler="runc")
    with cri.pod() as pod:
        id = cri.run(pod, "c", ["sleep", "1000"])
        setup("--yes")
        assert cri.exec(id, "echo", "hi") == (0, "hi\n")
    cri.close()


def test_restart_that_fails_brings_the_earlier_configuration_back(bare: Path, tmp_path: Path) -> None:
    """The first restart fails; the one with the earlier files succeeds."""
    once = tmp_path / "once"
    script = f"sh -c 'if mkdir {once}; then exit 7; else {RESTART}; fi'"
    before, others = texts(), handlers()
    failed = setup("--yes", restart=script, status=1)
    assert "ended with 7" in failed.stderr
    assert "the earlier configuration is back, and containerd runs with it" in failed.stderr
    assert (texts(), handlers()) == (before, others)
    assert run(["ctr", "version"])


def test_shim_is_written_where_it_is_missing_or_another(bare: Path) -> None:
    program = Path("/usr/local/bin/containerd-shim-kybernate-v1")
    content = program.read_bytes()
    try:
        program.unlink()
        assert f"{program} will be written" in setup("--dry-run").stdout
        assert not program.exists()
        setup("--yes")
        assert program.read_bytes() == content
        program.write_text("#!/bin/sh\nexit 9\n")
        assert json.loads(setup("--yes", "--json").stdout)["verified"]
        assert program.read_bytes() == content
    finally:
        program.unlink(missing_ok=True)
        program.write_bytes(content)
        program.chmod(0o755)


def test_container_that_does_not_run_brings_the_earlier_configuration_back(bare: Path) -> None:
    settings, before = Path("/etc/kybernate/shim.toml"), texts()
    kept = settings.read_bytes() if settings.exists() else None
    settings.parent.mkdir(exist_ok=True)
    try:
        settings.write_text('runtime = "/nonexistent/runc"\n')
        failed = setup("--yes", status=1)
        assert "does not run" in failed.stderr
        assert texts() == before
    finally:
        settings.unlink()
        if kept is not None:
            settings.write_bytes(kept)


def test_without_a_restart_the_files_are_left_to_the_administrator(bare: Path) -> None:
    pid = Containerd().pid
    done = json.loads(setup("--yes", "--json", restart="").stdout)
    assert done["changed"]
    assert not done["verified"]
    assert "restart containerd" in done["pending"]
    assert Containerd().pid == pid
    Containerd().restart()
    assert json.loads(setup("--yes", "--json", restart="").stdout)["verified"]


def test_broken_configuration_is_left_alone(bare: Path) -> None:
    bare.write_text(bare.read_text() + "[[[")
    before = texts()
    assert "not valid TOML" in setup("--yes", status=1).stderr
    assert texts() == before


def test_question_is_asked_first(bare: Path) -> None:
    before = texts()
    assert "--yes" in setup(status=4).stderr
    assert texts() == before


def test_nothing_of_containerd_is_a_sentence() -> None:
    done = setup("--config", "/nonexistent/config.toml", "--dry-run")
    assert "conf.d/kybernate.toml" in done.stdout or "+version" in done.stdout
    assert "Traceback" not in done.stderr
