"""The way of VRAM's bytes into an image and back: around CRIU, written by the driver itself, or through CRIU."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.image.store import read_image
from kybernate_shim.linux.ptrace.seized import SeizedProcess
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import assert_whole, kybernate
from tests.system.ctr import CommandFailed, Ctr, eventually


def test_vram_travels_beside_criu(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    log = image.parent / "log"
    with gpu.computing(ctr, *gpu.command(mib=64), log=log) as container:
        answer = json.loads(kybernate("checkpoint", container.id, str(image), "--json"))
        container.computes_on()
    names = [step["name"] for step in answer["steps"]]
    assert names.index("cuda-checkpoint") < names.index("vram-save") < names.index("dump")
    assert names.index("dump") < names.index("vram-load") < names.index("cuda-restore")
    manifest = assert_whole(image)
    (file,) = manifest.vram
    assert manifest.data_path.name == "fast"
    assert file.size >= 64 << 20
    assert next(one.digest for one in manifest.files if one.name == file.file) == file.digest
    pages = sum(one.size for one in manifest.files if one.name.startswith("pages-"))
    held = next(process.rss_bytes for process in manifest.processes if process.pid == file.pid)
    assert pages < 80 << 20, f"{pages} bytes went through CRIU, of a process with {held}"
    assert "verified" in kybernate("inspect", str(image), "--verify")


@pytest.mark.parametrize("programs", [1, 3])
def test_driver_writes_into_an_image_in_memory(ctr: Ctr, gpus: Gpus, memory: Path, programs: int) -> None:
    log = memory.parent / "log"
    first, second = memory / "first", memory / "second"
    with gpu.computing(ctr, *gpu.command(programs, mib=16), programs=programs, log=log) as container:
        used = gpus.used()
        kybernate("checkpoint", container.id, str(first))
        container.computes_on()
        kybernate("checkpoint", container.id, str(second), "--exit")
        eventually(lambda: gpus.used() == [0, 0])
    for image in (first, second):
        manifest = assert_whole(image)
        assert (manifest.data_path.name, manifest.data_path.why) == ("fast", "the driver wrote into the image itself")
        assert len(manifest.vram) == programs
        assert sum(process.bytes for held in manifest.gpus for process in held.processes) == sum(used)
        assert "verified" in kybernate("inspect", str(image), "--verify")
    with gpu.computing_again(ctr, second, log, programs=programs) as again:
        again.computes_on()
        assert gpus.used() == used


def test_vram_of_an_encrypted_image_is_in_memory_alone(
    ctr: Ctr, gpus: Gpus, image: Path, shim_config: Path, tmp_path: Path
) -> None:
    key, log = tmp_path / "image.key", image.parent / "log"
    key.write_text("11" * 32)
    key.chmod(0o600)
    shim_config.write_text(f'encryption_key = "{key}"\n')
    with gpu.computing(ctr, *gpu.command(mib=16), log=log) as container:
        used = gpus.used()
        kybernate("checkpoint", container.id, str(image.with_name("first")))
        container.computes_on()
        kybernate("checkpoint", container.id, str(image), "--exit")
    manifest = read_image(image).manifest
    assert (manifest.data_path.name, manifest.data_path.why) == ("fast", "the driver wrote into the image itself")
    assert {path.name for path in image.glob("*vram*")} == {f"{file.file}.enc" for file in manifest.vram} != set()
    assert "verified" in kybernate("inspect", str(image), "--verify")
    with gpu.computing_again(ctr, image, log) as again:
        again.computes_on()
        assert gpus.used() == used
        assert not Path("/run/kybernate/plain").exists()


@pytest.mark.parametrize("count", [1, 16])
def test_any_number_of_threads_moves_all_processes(
    ctr: Ctr, gpus: Gpus, image: Path, settings: Callable[[str], None], count: int
) -> None:
    settings(f'threads = {count}\nhuge_pages = "off"')
    log = image.parent / "log"
    with gpu.computing(ctr, *gpu.command(3, mib=9), programs=3, log=log) as container:
        kybernate("checkpoint", container.id, str(image), "--exit")
        assert len({file.pid for file in assert_whole(image).vram}) == 3
    with gpu.computing_again(ctr, image, log, programs=3) as again:
        again.computes_on()


def test_seccomp_profile_does_not_stand_in_the_way(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    log = image.parent / "log"
    with gpu.computing(ctr, log=log, flags=["--seccomp"]) as container:
        assert "Seccomp:\t2" in Path(f"/proc/{ctr.pid(container.id)}/status").read_text()
        kybernate("checkpoint", container.id, str(image))
        container.computes_on()
        kybernate("checkpoint", container.id, f"{image}2", "--exit")
        assert assert_whole(Path(f"{image}2")).data_path.name == "fast"
    with gpu.computing_again(ctr, Path(f"{image}2"), log, flags=["--seccomp"]) as again:
        again.computes_on()


def test_plain_way_is_there_by_setting(ctr: Ctr, gpus: Gpus, image: Path, settings: Callable[[str], None]) -> None:
    settings('data_path = "plain"')
    log = image.parent / "log"
    with gpu.computing(ctr, log=log) as container:
        kybernate("checkpoint", container.id, str(image), "--exit")
    manifest = assert_whole(image)
    assert (manifest.data_path.name, manifest.vram) == ("plain", ())
    with gpu.computing_again(ctr, image, log) as again:
        again.computes_on()


def test_process_that_cannot_be_traced_goes_the_plain_way(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    """Another tracer holds it until its memory is in the host's; CRIU, which traces, too, finds it free again."""
    with gpu.computing(ctr, *gpu.command(pause_ms=1000), polls=False) as container, ExitStack() as holding:
        before = container.steps()
        eventually(lambda: container.steps() != before)  # it pauses now, and is not in the driver's hands
        holding.enter_context(SeizedProcess(ctr.pid(container.id), spare=lambda name: name.startswith("cuda")))
        with gpu.begun("kybernate", "checkpoint", container.id, str(image)) as checkpoint:
            eventually(lambda: gpus.used() == [0, 0], seconds=30)
            holding.close()
            assert checkpoint.wait(30) == 0
        manifest = assert_whole(image)
        assert (manifest.data_path.name, manifest.vram) == ("plain", ())
        assert "traces it already" in manifest.data_path.why
        container.computes_on()


def test_wrong_byte_of_vram_stops_the_restore_before_the_process_runs(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    log = image.parent / "log"
    with gpu.computing(ctr, log=log) as container:
        kybernate("checkpoint", container.id, str(image), "--exit")
    (vram,) = assert_whole(image).vram
    file = image / vram.file
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    before = log.read_text()
    with (
        pytest.raises(CommandFailed, match="does not hold the bytes that were saved"),
        gpu.computing_again(ctr, image, log),
    ):
        pass
    assert (log.read_text(), gpus.used()) == (before, [0, 0])
    assert vram.file in kybernate("inspect", str(image), "--verify", status=1)
