"""Output into files, and what happens when the disk is full."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.stdio_bench import DEADLINE, Bench, Run, fixture_bench, until

__all__ = ["fixture_bench"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    mountpoint = tmp_path / "disk"
    mountpoint.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", mountpoint], check=True)
    yield mountpoint
    subprocess.run(["umount", mountpoint], check=True)


def test_log_file_is_made_with_its_directories_and_gets_both_outputs(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        log = b.directory / "a" / "b" / "my log"
        umask = os.umask(0o022)
        try:
            for _ in range(2):
                stdio = await b.open(stdout=f"file://{b.directory}/a/b/my%20log")
                await b.shell(stdio, "echo out; echo err >&2")
                assert await stdio.drained(DEADLINE)
        finally:
            os.umask(umask)
        assert sorted(log.read_text().split()) == ["err", "err", "out", "out"]
        assert stat.S_IMODE(log.stat().st_mode) == 0o644
        assert stat.S_IMODE(log.parent.stat().st_mode) == 0o755

    bench(work)


def test_plain_file_is_appended_to(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        log = b.directory / "log"
        log.write_text("before\n")
        stdio = await b.open(stdout=str(log), stderr=str(log))
        await b.shell(stdio, "echo out; echo err >&2")
        assert await stdio.drained(DEADLINE)
        assert log.read_text().startswith("before\n")
        assert sorted(log.read_text().split()) == ["before", "err", "out"]

    bench(work)


@pytest.mark.root
def test_full_disk_does_not_stop_the_process_and_the_loss_is_counted(bench: Run[None], disk: Path) -> None:
    async def work(b: Bench) -> None:
        stdio = await b.open(stdout=f"file://{disk}/log")
        child = await b.start(stdio, "head", "-c", "1000000", "/dev/zero")
        assert (await child.exited).status == 0
        assert await stdio.drained(DEADLINE)
        kept = (disk / "log").stat().st_size
        assert 0 < kept <= 65536
        refused, lost = b.logged.entries
        assert (refused["event"], refused["stream"]) == ("output.refused", "stdout")
        assert "No space left" in str(refused["error"])
        assert lost == {"event": "output.lost", "stream": "stdout", "bytes": 1000000 - kept}

    bench(work)


@pytest.mark.root
def test_output_goes_on_once_the_disk_has_room_again(bench: Run[None], disk: Path) -> None:
    async def work(b: Bench) -> None:
        ballast = disk / "ballast"
        stdin = b.fifo("in")
        stdio = await b.open(stdin, f"file://{disk}/log")
        ballast.write_bytes(bytes(65536))
        await b.start(stdio, "cat")
        typist = b.writer(stdin)
        os.write(typist, b"lost")
        await until(lambda: bool(b.logged.named("output.refused")), "the loss is in the log")
        ballast.unlink()
        os.write(typist, b"kept")
        await until(lambda: (disk / "log").read_bytes() == b"kept", "output after the loss is in the file")
        assert [entry["bytes"] for entry in b.logged.named("output.lost")] == [4]
        os.close(typist)
        stdio.close_stdin()
        assert await stdio.drained(DEADLINE)

    bench(work)
