"""The report on a node: each thing that keeps Kybernate from its work is named, with what to do."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kybernate.node import exposed, health, runtimes
from kybernate.node.finding import HealthFinding
from kybernate.node.left_locked import LeftLocked
from kybernate_shim.config import Config, ConfigInvalid, GpuSettings
from kybernate_shim.gpu.errors import CudaError, CudaUnavailable
from kybernate_shim.gpu.helper_answers import CudaInfo
from kybernate_shim.gpu.helper_answers import NodeGpu as Gpu
from kybernate_shim.linux.cgroup.cgroup import Cgroup
from tests.unit.node.test_containerd_health import GOOD

GIB = 1 << 30
GPU = Gpu("GPU-1", "NVIDIA H200", 2 * GIB, GIB, mig=False)
DRIVER = CudaInfo("580.159.04", 13000, (GPU,), ())
Line = tuple[str, str, str]


class Node:
    """A node in a directory, on which all is well until a test changes it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = Config(checkpoint_root=root / "roots", work_root=root / "work", key_directory=root / "keys")
        self.driver: CudaInfo | CudaError = DRIVER
        for name in ("bin", "driver", "roots", "work", "run", "state", "etc"):
            (root / name).mkdir(mode=0o700)
        self.write("huge", "always [madvise] never\n")
        self.write("io_uring", "2\n")
        self.write("yama", "1\n")
        self.program("criu", 'case $1 in --version) echo "Version: 4.2";; *) echo Looks good.;; esac')
        for name in ("runc", "crun", "nvidia-container-runtime"):
            self.program(name, f"echo {name} version 1.3")

    def write(self, name: str, text: str) -> None:
        (self.root / name).write_text(text)

    def program(self, name: str, script: str) -> None:
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def report(self) -> dict[str, Line]:
        return {one.subject: (one.verdict, one.found, one.advice) for one in health.examine()}

    def bad(self, subject: str) -> tuple[str, str]:
        """Return what is found of a subject, and the advice; one of its lines must be bad."""
        lines = [(one.found, one.advice) for one in health.examine() if (one.subject, one.verdict) == (subject, "bad")]
        assert lines, self.report()
        return lines[0]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node(tmp_path)
    names = {"SWITCH": "huge", "IO_URING": "io_uring", "YAMA": "yama", "DRIVER": "driver"}
    for constant, name in names.items():
        monkeypatch.setattr(health, constant, tmp_path / name)
    monkeypatch.setattr(runtimes, "DRIVER", tmp_path / "driver")
    monkeypatch.setattr(health.containerd_facts, "gather", lambda: GOOD)
    for constant, name in {"RUN": "run", "STATE": "state", "DEFAULT_PATH": "etc/shim.toml"}.items():
        monkeypatch.setattr(exposed, constant, tmp_path / name)

    class Helper:
        async def info(self) -> CudaInfo:
            if isinstance(made.driver, CudaError):
                raise made.driver
            return made.driver

    @asynccontextmanager
    async def helper() -> AsyncIterator[Helper]:
        yield Helper()

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 << 30))
    monkeypatch.setattr(health, "cuda_helper", helper)
    monkeypatch.setattr(health.left_locked, "find", list)
    monkeypatch.setattr(runtimes, "DIRECTORIES", {runtimes.GPU_RUNTIME: ()})
    monkeypatch.setattr(Config, "load", lambda: made.config)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return made


def test_node_on_which_all_is_well_has_no_advice(node: Node) -> None:
    report = node.report()
    report.pop("user", None)
    assert {subject: line for subject, line in report.items() if line[0] != "ok" or line[2]} == {}
    assert {"kernel", "CRIU", "runc", "crun", "checkpoint root", "files", "VRAM bytes", "GPU-1"} <= report.keys()


def test_configuration_that_is_invalid_is_all_that_is_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def invalid() -> Config:
        raise ConfigInvalid("shim.toml", ["deadlines.create must be 0 or more"])

    monkeypatch.setattr(Config, "load", invalid)
    assert "deadlines.create" in node.bad("configuration")[0]
    assert len(node.report()) == 1


@pytest.mark.parametrize(
    ("file", "text", "subject"), [("huge", "always [never]", "huge pages"), ("io_uring", "0", "io_uring")]
)
def test_switch_of_the_kernel_that_costs_something_is_noted(node: Node, file: str, text: str, subject: str) -> None:
    node.write(file, text)
    verdict, _, advice = node.report()[subject]
    assert verdict == "note"
    assert advice


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo Version: 3.17", "3.17"),
        ("exit 1", "does not run"),
        ("case $1 in --version) echo Version: 4.2;; *) echo no ptrace; exit 1;; esac", "4.2: no ptrace"),
    ],
)
def test_criu_that_cannot_work_is_bad(node: Node, script: str, found: str) -> None:
    node.program("criu", script)
    said, advice = node.bad("CRIU")
    assert said == found
    assert advice


def test_plugin_of_criu_that_is_in_the_way_is_bad(node: Node) -> None:
    node.config = replace(node.config, criu_libdir=node.root)
    assert node.report()["CRIU's plugins"][0] == "note"
    node.write(health.CUDA_PLUGIN, "")
    assert "remove it" in node.bad("CRIU's plugins")[1]


def test_runtime_that_is_missing_is_named(node: Node) -> None:
    for name in ("runc", "crun", runtimes.GPU_RUNTIME):
        (node.root / "bin" / name).unlink()
    assert node.bad("runc") == ("not in PATH", "install runc, or name another by `runtime`")
    assert node.report()[runtimes.GPU_RUNTIME][:2] == ("note", "missing")


@pytest.mark.parametrize(
    ("version", "verdict"), [("1.0.3", "bad"), ("1.1.15", "ok"), ("1.5.2", "ok"), ("1.6.0", "note"), ("unknown", "ok")]
)
def test_version_of_runc_is_compared_with_those_tested(node: Node, version: str, verdict: str) -> None:
    node.program("runc", f"echo runc version {version}")
    found = node.report()["runc"]
    assert found[:2] == (verdict, f"runc version {version}")
    assert bool(found[2]) == (verdict != "ok")


def test_directory_of_others_is_bad(node: Node) -> None:
    (node.root / "roots").chmod(0o777)
    assert "roots" in node.bad("files")[0]


def test_kernel_that_lets_nobody_trace_is_bad(node: Node) -> None:
    node.write("yama", "3\n")
    assert "no process may trace" in node.bad("VRAM bytes")[0]
    node.config = replace(node.config, gpu=GpuSettings(data_path="plain"))
    assert node.report()["VRAM bytes"][0] == "note"


@pytest.mark.parametrize(
    ("driver", "verdict", "words"),
    [
        (replace(DRIVER, missing_calls=("cuCheckpointProcessLock",)), "bad", "lacks cuCheckpointProcessLock"),
        (replace(DRIVER, api_version=12080), "note", "CUDA 12.8"),
        (CudaUnavailable("the CUDA driver cannot be loaded"), "bad", "cannot be loaded"),
    ],
)
def test_driver_that_lacks_something_is_named(
    node: Node, driver: CudaInfo | CudaError, verdict: str, words: str
) -> None:
    node.driver = driver
    line = node.report()["GPU driver"]
    assert line[0] == verdict
    assert words in line[1]
    assert line[2]


def test_driver_that_the_configuration_denies_is_bad(node: Node) -> None:
    node.config = replace(node.config, gpu=GpuSettings(denied_drivers=("580.159.*",)))
    assert "gpu.denied_drivers" in node.bad("GPU driver")[0]


def test_node_without_a_gpu_lacks_none(node: Node) -> None:
    (node.root / "driver").rmdir()
    node.driver = CudaUnavailable("the CUDA driver cannot be loaded")
    assert node.report()["GPU driver"] == ("note", "the CUDA driver cannot be loaded", "")


def test_gpu_whose_memory_has_no_place_is_named(node: Node) -> None:
    node.driver = replace(DRIVER, gpus=(replace(GPU, mig=True), replace(GPU, uuid="GPU-2", total_bytes=100 * GIB)))
    assert "MIG" in node.bad("GPU-1")[0]
    assert node.report()["GPU-2"][2] == "the node has only 64.0 GiB of host memory for its VRAM"


def test_processes_of_a_dead_shim_are_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    left = LeftLocked("k8s.io", "c1", {7: "LOCKED"}, Cgroup(2, {}))
    monkeypatch.setattr(health.left_locked, "find", lambda: [left])
    assert node.bad("GPU state")[0] == str(left)
    repaired: list[LeftLocked] = []
    monkeypatch.setattr(health.left_locked, "repair", lambda one: repaired.append(one) or [])
    lines = {one.subject: one.verdict for one in health.examine(fix=True)}
    assert (lines["GPU state"], repaired) == ("ok", [left])


def test_fix_closes_what_is_open(node: Node) -> None:
    (node.root / "keys").mkdir(mode=0o700)
    os.chmod(node.root / "run", 0o755)  # noqa: PTH101
    assert node.report()["files"][0] == "note"
    health.examine(fix=True)
    assert node.report()["files"][0] == "ok"


def test_look_that_may_not_see_something_is_a_finding_itself(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(config: Config) -> Iterator[HealthFinding]:
        raise PermissionError(13, "Permission denied", "/run/kybernate/arena/memory")
        yield

    monkeypatch.setattr(health, "_arena", denied)
    verdict, found, advice = node.report()["arena"]
    assert (verdict, advice) == ("note", "run as root")
    assert "Permission denied" in found
