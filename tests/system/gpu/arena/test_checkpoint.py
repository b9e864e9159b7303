"""Images of containers whose VRAM is in the arena, or goes through it, and their restores."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.arena.memory import Memory
from kybernate_shim.gpu.helper_client import log_path
from kybernate_shim.ttrpc import RpcError
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import MANIFEST, PYTHON, assert_whole, kybernate, refused, save
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.arena import MIB, PIECES, SIZE, WANTED, in_arena, pieces_copied, small_gpus

SLOW = 60  # seconds for a GiB: the driver takes half a second for a context
READY_AND_BACK = ("arena.expected", "arena.settled")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory on a tmpfs, for images whose files may be mapped."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def test_suspended_container_stays_away_for_its_checkpoint(ctr: Ctr, gpus: Gpus, tmp_path: Path) -> None:
    log, image = tmp_path / "log", tmp_path / "image"
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=WANTED, log=log) as container:
        kybernate("suspend", container.id)
        kybernate("checkpoint", container.id, str(image))
        assert in_arena(ctr, container.id) == MIB << 20
        assert gpu.noted_as_locked(ctr.pid(container.id))
        assert_whole(image)
        assert arena_of(image) == MIB << 20
        container.stands_still()
        kybernate("resume", container.id)
        container.computes_on()
        assert not gpu.noted_as_locked(ctr.pid(container.id))
        kybernate("suspend", container.id)
        kybernate("checkpoint", container.id, f"{image}2", "--exit")
    assert Memory(SIZE).free() == SIZE
    with gpu.computing_again(ctr, Path(f"{image}2"), log, flags=WANTED) as again:
        again.computes_on()
        assert in_arena(ctr, again.id) == 0
        assert "arena-take" in kybernate("suspend", again.id, "--json")
        assert in_arena(ctr, again.id) == MIB << 20
        kybernate("resume", again.id)
        again.computes_on()


def test_checkpoint_of_a_suspended_container_needs_no_room_on_its_gpu(ctr: Ctr, gpus: Gpus, tmp_path: Path) -> None:
    with gpu.computing(ctr, *gpu.command(mib=48, pause_ms=50), flags=WANTED) as container:
        kybernate("suspend", container.id)
        with small_gpus(gpus, 24):
            kybernate("checkpoint", container.id, str(tmp_path / "image"))
            container.stands_still()
        kybernate("resume", container.id)
        container.computes_on()


def arena_of(image: Path) -> int:
    """Return the bytes of an image that were in the arena, and are for one."""
    document = json.loads(kybernate("inspect", "--json", str(image)))["manifest"]
    return sum(file["size"] for file in document["arena"])


def test_checkpoint_goes_through_the_arena_and_so_does_the_restore(ctr: Ctr, gpus: Gpus, tmp_path: Path) -> None:
    log, image = tmp_path / "log", tmp_path / "image"
    with gpu.computing(ctr, *gpu.command(2, mib=MIB), programs=2, flags=WANTED, log=log) as container:
        steps = steps_of(kybernate("checkpoint", container.id, str(image), "--json"))
        assert steps["arena-take"] == steps["arena-save"] == steps["arena-give"] == 2 * MIB << 20
        container.computes_on()
        assert arena_of(image) == 2 * MIB << 20
        kybernate("inspect", "--verify", str(image))
    for number in range(2):
        with gpu.computing_again(ctr, image, tmp_path / f"log{number}", programs=2, flags=WANTED) as again:
            again.computes_on()
            readied, *given = [event for event in told_by_the_helper() if event["event"] in READY_AND_BACK][-3:]
            assert (readied["event"], readied["bytes"]) == ("arena.expected", 2 * MIB << 20)
            assert [event["event"] for event in given] == ["arena.settled"] * 2
        assert Memory(SIZE).free() == SIZE


def test_restore_onto_the_other_gpu_takes_the_arenas_bytes_along(ctr: Ctr, gpus: Gpus, tmp_path: Path) -> None:
    log, image = tmp_path / "log", tmp_path / "image"
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=WANTED, log=log) as container:
        kybernate("checkpoint", container.id, str(image), "--exit")
    gpu.kill_helpers()  # with the context that the arena's worker has on the first GPU
    eventually(lambda: gpus.used() == [0, 0])
    with gpu.computing_again(ctr, image, log, device=1, flags=WANTED) as again:
        again.computes_on()
        gpu.kill_helpers()
        eventually(lambda: gpus.used()[0] == 0)
        assert gpus.used()[1] > MIB << 20
        assert "arena-take" in kybernate("suspend", again.id, "--json")
        kybernate("resume", again.id)
        again.computes_on()


def test_bytes_are_on_their_gpu_before_the_program_is(ctr: Ctr, gpus: Gpus, tmp_path: Path) -> None:
    log, image = tmp_path / "log", tmp_path / "image"

    def prefetched() -> int:
        return [event["prefetched_bytes"] for event in told_by_the_helper() if event["event"] == "arena.settled"][-1]

    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=WANTED, log=log) as container:
        kybernate("suspend", container.id)
        kybernate("resume", container.id)
        held = gpus.used()
        kybernate("suspend", container.id)
        gpus.slow(SLOW)
        kybernate("resume", container.id)
        assert prefetched() == MIB << 20
        assert gpus.used() == held
        container.computes_on()
        kybernate("checkpoint", container.id, str(image), "--exit")
    with gpu.computing_again(ctr, image, log, device=1, flags=WANTED) as again:
        again.computes_on()
        assert prefetched() == MIB << 20


def test_container_is_copied_once_and_then_what_has_changed(ctr: Ctr, gpus: Gpus, tmp_path: Path) -> None:
    image = tmp_path / "image"
    with gpu.holding(ctr, PIECES, WANTED) as container:
        assert pieces_copied(container) == PIECES
        assert pieces_copied(container) == 0
        container.fill(3, 99)
        assert pieces_copied(container) == 1
        container.fill(3, 0)
        assert pieces_copied(container) == 0
        kybernate("checkpoint", container.id, str(image), "--exit")
        with gpu.holding_again(ctr, image, container, WANTED):
            assert container.is_right()
            assert pieces_copied(container) == 0  # the hashes were made while it came back
            container.fill(5, 55)
            assert pieces_copied(container) == 1


def told_by_the_helper() -> list[dict[str, Any]]:
    return [json.loads(line) for line in log_path(gpu.SOCKET).read_text().splitlines() if line.startswith("{")]


def steps_of(answer: str) -> dict[str, int]:
    return {step["name"]: step["bytes"] for step in json.loads(answer)["steps"]}


def test_damage_of_the_arenas_bytes_stops_the_restore(ctr: Ctr, gpus: Gpus, tmp_path: Path) -> None:
    log, image = tmp_path / "log", tmp_path / "image"
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=WANTED, log=log) as container:
        kybernate("checkpoint", container.id, str(image), "--exit")
    (file,) = image.glob("kybernate-arena-*.bin")
    with file.open("r+b") as stream:
        first = stream.read(1)
        stream.seek(0)
        stream.write(bytes([first[0] ^ 1]))
    assert "is damaged" in refused("kybernate", "inspect", "--verify", str(image))
    said = restore_refused(ctr, image)
    assert f"{file.name} does not hold the bytes that were saved" in said
    assert "nothing is left of it" in said
    assert Memory(SIZE).free() == SIZE
    with file.open("r+b") as stream:
        stream.write(first)
    with gpu.computing_again(ctr, image, log, flags=WANTED) as again:
        again.computes_on()


def restore_refused(ctr: Ctr, image: Path) -> str:
    own, id = Ctr(ctr.runtime, ctr.namespace, PYTHON), ctr.new_id("r")
    flags = ["-d", *gpu.mounts(), *gpu.visible(0), *WANTED]
    try:
        return refused(*own.run_argv(id, "false", flags=[*flags, "--annotation", f"kybernate.io/restore-from={image}"]))
    finally:
        own.remove(id)


def test_restore_that_the_arena_has_no_room_for_is_refused_before(ctr: Ctr, gpus: Gpus, tmp_path: Path) -> None:
    log, image = tmp_path / "log", tmp_path / "image"
    large = gpu.command(mib=(SIZE >> 20) - MIB, pause_ms=50)
    with gpu.computing(ctr, *large, flags=WANTED, log=log) as container:
        kybernate("checkpoint", container.id, str(image), "--exit")
    with gpu.computing(ctr, *gpu.command(mib=2 * MIB), flags=WANTED) as other:
        kybernate("suspend", other.id)
        said = restore_refused(ctr, image)
        assert f"needs {(SIZE >> 20) - MIB} MiB of the node's, and {(SIZE >> 20) - 2 * MIB} of its" in said
        assert "gpu.arena" in said
        kybernate("resume", other.id)
        other.computes_on()
    with gpu.computing_again(ctr, image, log, flags=WANTED) as again:
        again.computes_on()


def test_save_that_fails_leaves_the_program_computing(ctr: Ctr, gpus: Gpus, tmp_path: Path) -> None:
    log, image = tmp_path / "log", tmp_path / "image"
    image.mkdir(mode=0o700)
    for pid in range(100):
        (image / f"kybernate-arena-{pid}.bin").write_text("somebody else's")
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=WANTED, log=log) as container:
        with pytest.raises(RpcError, match=r"continues as before: .*\.bin cannot be opened: File exists"):
            save(ctr, container.id, image)
        assert not (image / MANIFEST).exists()
        assert {path.read_text() for path in image.glob("kybernate-arena-*.bin")} == {"somebody else's"}
        container.computes_on()
        assert in_arena(ctr, container.id) == 0
        kybernate("checkpoint", container.id, f"{image}2")
        container.computes_on()


def test_suspended_container_owns_its_bytes_after_a_checkpoint(
    ctr: Ctr, gpus: Gpus, tmp_path: Path, memory: Path
) -> None:
    """Whatever becomes of the image, and although another checkpoint looks at what is mapped."""
    log = tmp_path / "log"
    # As good as all of the region is data, or it would not be mapped.
    with gpu.computing(ctr, *gpu.command(mib=112), flags=WANTED, log=log) as container:
        kybernate("suspend", container.id)
        kybernate("checkpoint", container.id, str(memory / "first"))
        shutil.rmtree(memory / "first")
        kybernate("checkpoint", container.id, str(memory / "second"))
        assert_whole(memory / "second")
        container.stands_still()
        kybernate("resume", container.id)
        container.computes_on()
