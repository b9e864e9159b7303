"""What CRIU may do to a container with GPU state: fail without harm, and load no plugin."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import assert_no_image, kybernate, refused
from tests.system.ctr import Ctr
from tests.system.programs import CRIU, script


def test_failing_dump_leaves_the_container_computing(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    failing_dump_does_no_harm(ctr, gpus, image)


def failing_dump_does_no_harm(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    criu, config = image.parent / "criu", Path("/etc/kybernate/shim.toml")
    script(criu, f'case "$*" in *--version*) exec {CRIU} "$@";; *) exit 1;; esac')
    config.parent.mkdir(exist_ok=True)
    config.write_text(f'criu = "{criu}"\n')
    try:
        with gpu.computing(ctr) as container:
            used = gpus.used()
            refused("kybernate", "checkpoint", container.id, str(image))
            container.computes_on()
            assert gpus.used() == used
            assert_no_image(image)
    finally:
        config.unlink()


def test_criu_loads_none_of_its_own_plugins(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    """CRIU fails with a broken plugin: so this proves that neither dump nor restore looks where it looks by default."""
    log, broken = image.parent / "log", Path("/usr/lib/criu/broken_plugin.so")
    there = broken.parent.exists()
    broken.parent.mkdir(exist_ok=True)
    broken.write_text("no library")
    try:
        with gpu.computing(ctr, log=log) as container:
            kybernate("checkpoint", container.id, str(image), "--exit")
        with gpu.computing_again(ctr, image, log) as again:
            again.computes_on()
    finally:
        broken.unlink()
        if not there:
            broken.parent.rmdir()


def test_cuda_plugin_of_criu_is_refused_by_name(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    plugin, config = image.parent / "cuda_plugin.so", Path("/etc/kybernate/shim.toml")
    plugin.parent.mkdir(exist_ok=True)
    plugin.touch()
    config.parent.mkdir(exist_ok=True)
    config.write_text(f'criu_libdir = "{plugin.parent}"\n')
    try:
        with gpu.computing(ctr) as container:
            assert str(plugin) in refused("kybernate", "checkpoint", container.id, str(image))
            container.computes_on()
            assert_no_image(image)
    finally:
        config.unlink()


def test_failing_dump_into_memory_leaves_the_container_computing(ctr: Ctr, gpus: Gpus, memory: Path) -> None:
    failing_dump_does_no_harm(ctr, gpus, memory / "image")


def test_doctor_tells_what_the_node_can_do(gpus: Gpus) -> None:
    found = {one["subject"]: one for one in json.loads(kybernate("doctor", "--json"))}
    assert (found["CRIU"]["verdict"], found["GPU driver"]["verdict"]) == ("ok", "ok")
    assert all(found[uuid]["found"].startswith("Pretended H200") for uuid in gpus.uuids)
    assert found["VRAM bytes"]["found"] == "directly, huge pages: process"
    gpus.missing("cuCheckpointProcessLock")
    bad = json.loads(kybernate("doctor", "--json", status=1))
    assert any(one["verdict"] == "bad" and "cuCheckpointProcessLock" in one["found"] for one in bad)
