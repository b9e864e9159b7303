"""Suspend and resume in place, without an image: the GPU is free meanwhile, the processes stay."""

from __future__ import annotations

from tests.documentation import block
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import kybernate, refused
from tests.system.checkpoints import shim_of as daemon_of
from tests.system.ctr import Ctr, run


def test_suspend_and_resume_fifty_times(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, *gpu.command(pause_ms=1)) as container:
        used, daemon = gpus.used(), daemon_of(ctr, container.id)
        descriptors = daemon.num_fds()
        for _ in range(50):
            answer = gpu.ask_shim(ctr, container.id, "Suspend")
            assert (answer.vram_bytes, gpus.used()) == (used[0], [0, 0])
            assert gpu.ask_shim(ctr, container.id, "Resume").vram_bytes == used[0]
            assert gpus.used() == used
        container.computes_on()
        assert daemon.num_fds() == descriptors


def test_first_suspend_of_the_readme(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr) as container:
        used = gpus.used()
        for line in block("README.md", "first-suspend").commands:
            run(["sh", "-exc", line.replace("trainer", container.id)])
            if " suspend " in line:
                assert gpus.used() == [0, 0]
        assert gpus.used() == used
        container.computes_on()


def test_time_out_of_a_resume_is_kept_to(ctr: Ctr, gpus: Gpus) -> None:
    """The driver's first restore hangs forever, and would be waited for ten minutes as configured."""
    with gpu.computing(ctr) as container:
        kybernate("suspend", container.id)
        gpus.switch("restore:1:hang")
        kybernate("resume", container.id, "--timeout", "1")
        container.computes_on()


def test_pause_of_an_annotated_container_frees_the_gpu(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, flags=["--annotation", "kybernate.io/pause=suspend"]) as container:
        used = gpus.used()
        ctr("task", "pause", container.id)
        assert (ctr.status(container.id), gpus.used()) == ("PAUSED", [0, 0])
        ctr("task", "resume", container.id)
        container.computes_on()
        assert gpus.used() == used


def test_resume_without_room_leaves_the_container_suspended(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, *gpu.command(mib=150)) as container:
        kybernate("suspend", container.id)
        with gpu.computing(ctr, *gpu.command(mib=350)):
            assert "MiB free" in refused("kybernate", "resume", container.id)
            container.stands_still()
        kybernate("resume", container.id)
        container.computes_on(seconds=40)


def test_container_without_gpu_state_has_nothing_to_suspend(ctr: Ctr, gpus: Gpus) -> None:
    with ctr.running("sleep", "1000") as id:
        assert "no process" in refused("kybernate", "suspend", id)


def test_process_that_somebody_left_locked_is_helped_by_hand(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr) as container:
        pid = str(ctr.pid(container.id))
        assert "locked" in kybernate("cuda", "lock", "--pid", pid)
        container.stands_still()
        assert "CUDA_ERROR_ILLEGAL_STATE" in refused("kybernate", "cuda", "lock", "--pid", pid)
        kybernate("cuda", "checkpoint", "--pid", pid)
        assert gpus.used() == [0, 0]
        kybernate("resume", container.id)
        container.computes_on()
