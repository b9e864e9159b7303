"""The spellings under which containerd finds the shim, the options that arrive with each, and crun in runc's place."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from kybernate_shim.messages.types_pb2 import RuntimeInfo
from tests.contract.runtime_bench import find_runtime
from tests.lab.containerd_config import SHIM
from tests.system.checkpoints import refused
from tests.system.ctr import BUNDLES, KYBERNATE, CommandFailed, Ctr, eventually, run

ALIAS = "io.containerd.runc.kybernate.v1"  # containerd's clients take it for a runc, and send runc's options


def runtime_of(ctr: Ctr, id: str) -> str:
    """Return the OCI runtime's program that runs a container."""
    return Path((BUNDLES / ctr.namespace / id / "runtime").read_text()).name


@pytest.mark.parametrize("name", [KYBERNATE, ALIAS, SHIM], ids=["name", "alias", "path"])
def test_shim_is_found_under_every_name(name: str) -> None:
    ctr = Ctr(runtime=name)
    with ctr.running("sleep", "1000") as id:
        assert ctr.exec(id, "echo", "hi") == "hi\n"
        assert runtime_of(ctr, id) == "runc"
    assert ctr.run("sh", "-c", "exit 3", status=3) == ""


@pytest.mark.parametrize("name", [KYBERNATE, ALIAS], ids=["name", "alias"])
def test_no_pivot_reaches_the_runtime(name: str, shim_config: Path, tmp_path: Path) -> None:
    """containerd sends it in another message to each name, and 1.7 in one that its own shim does not know."""
    calls = tmp_path / "calls"
    recorder = tmp_path / "recorder"
    recorder.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec runc "$@"\n')
    recorder.chmod(0o755)
    shim_config.write_text(f'runtime = "{recorder}"\n')
    ctr = Ctr(runtime=name)
    assert ctr.run("echo", "hi", flags=["--no-pivot"]) == "hi\n"
    create = next(line for line in calls.read_text().splitlines() if " create " in line)
    assert "--no-pivot" in create.split()


@pytest.fixture
def crun(tmp_path: Path) -> Path:
    return find_runtime("crun", tmp_path)


def test_configuration_file_of_one_container_is_followed(ours: Ctr, crun: Path, tmp_path: Path) -> None:
    config = tmp_path / "own.toml"
    config.write_text(f'runtime = "{crun}"\n')
    with ours.running("sleep", "1000", flags=["--runtime-config-path", str(config)]) as id:
        assert runtime_of(ours, id) == "crun"
    with ours.running("sleep", "1000") as id:
        assert runtime_of(ours, id) == "runc"


def test_configuration_file_with_a_mistake_is_named(ours: Ctr, tmp_path: Path) -> None:
    config = tmp_path / "own.toml"
    config.write_text("runtime = 7\n")
    with pytest.raises(CommandFailed, match=r"own\.toml.*runtime must be a string"):
        ours.run("true", flags=["--runtime-config-path", str(config)])


def test_group_annotation_puts_containers_into_one_daemon(ours: Ctr) -> None:
    group = ["--annotation", f"io.containerd.runc.v2.group={ours.new_id('group')}"]
    with ours.running("sleep", "1000", flags=group) as one, ours.running("sleep", "1000", flags=group) as two:
        parents = {Path(f"/proc/{ours.pid(id)}/stat").read_text().rpartition(")")[2].split()[1] for id in (one, two)}
        assert len(parents) == 1


# -- crun -------------------------------------------------------------------------------------------------------------


def test_life_under_crun_is_that_under_runc(ours: Ctr, crun: Path, shim_config: Path) -> None:
    shim_config.write_text(f'runtime = "{crun}"\n')
    with ours.running("sh", "-c", "trap 'exit 9' TERM; while :; do sleep 0.1; done") as id:
        assert runtime_of(ours, id) == "crun"
        assert ours.exec(id, "cat", stdin=b"through a pipe") == "through a pipe"
        ours.exec(id, "sh", "-c", "exit 5", status=5)
        with pytest.raises(CommandFailed, match="no-such-binary"):
            ours.exec(id, "/no-such-binary")
        ours("task", "pause", id)
        assert ours.status(id) == "PAUSED"
        ours("task", "resume", id)
        assert ours.pid(id) in [int(line.split()[0]) for line in ours("task", "ps", id).splitlines()[1:]]
        assert "memory" in ours.metrics(id)
        ours("task", "kill", "-s", "SIGTERM", id)
        eventually(lambda: ours.status(id) == "STOPPED")
        with pytest.raises(CommandFailed, match=r"not found|already finished"):
            ours("task", "kill", "-s", "SIGTERM", id)


def test_output_codes_and_failures_under_crun(ours: Ctr, crun: Path, shim_config: Path) -> None:
    shim_config.write_text(f'runtime = "{crun}"\n')
    expected = "".join(f"{number}\n" for number in range(1, 200_001))
    out = ours.run("seq", "1", "200000")
    assert hashlib.sha256(out.encode()).digest() == hashlib.sha256(expected.encode()).digest()
    ours.run("sh", "-c", "exit 77", status=77)
    with pytest.raises(CommandFailed, match="no-such-command"):
        ours.run("/bin/no-such-command")


# -- what the shim says of itself -------------------------------------------------------------------------------------


def test_info_names_the_shim_and_what_its_runtime_can_do() -> None:
    said = subprocess.run([SHIM, "-info"], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    info = RuntimeInfo.FromString(said.stdout)
    assert info.name == KYBERNATE
    assert info.version.version in run([SHIM, "-v"])
    assert json.loads(info.features.value) == json.loads(run(["runc", "features"]))
    if not run(["containerd", "--version"]).split()[2].startswith("1."):  # 1.7 has no command for it
        seen = json.loads(run(["ctr", "plugins", "inspect-runtime", "--runtime", KYBERNATE]))
        assert seen["Name"] == KYBERNATE
        assert seen["Features"]["ociVersionMax"] == json.loads(info.features.value)["ociVersionMax"]


def test_crun_that_cannot_checkpoint_says_what_it_lacks(
    ours: Ctr, crun: Path, shim_config: Path, tmp_path: Path
) -> None:
    """With a program that cannot load CRIU's library, or has no such command, wherever the node's own can."""
    shim_config.write_text(f'runtime = "{crun}"\n')
    with ours.running("sleep", "1000") as id:
        said = refused("kybernate", "checkpoint", id, str(tmp_path / "image"), "--exit")
        assert "or use runc" in said
        assert "continues as before" in said
        assert not (tmp_path / "image").exists()
        assert ours.exec(id, "echo", "alive") == "alive\n"
