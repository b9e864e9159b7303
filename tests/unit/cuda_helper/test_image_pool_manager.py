"""The keeper of the pool: it makes what is missing, says once why it cannot, and leaves nothing half made."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import CapturingLogger

from kybernate_shim.cuda_helper import image_pool_manager
from kybernate_shim.cuda_helper.image_pool_manager import RETRY_SECONDS, ImagePoolManager
from kybernate_shim.vram_io import image_pool

MIB = 1 << 20
SIZES = (2 * MIB, 4 * MIB)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name, "pool")


def run(keeper: ImagePoolManager, body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            try:
                await body()
            finally:
                await keeper.close()

    asyncio.run(main())


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110  # it is another process that makes it true
        await asyncio.sleep(0.01)


def test_what_is_missing_is_made(directory: Path) -> None:
    log = CapturingLogger()
    keeper = ImagePoolManager(log)

    async def body() -> None:
        keeper.tidy(0, directory, SIZES)
        await until(lambda: log.calls)
        image_pool.take(directory, directory.parent / "image", 4 * MIB)
        keeper.tidy(1, directory, SIZES)
        await until(lambda: len(log.calls) == 2)
        keeper.tidy(2, directory, SIZES)  # nothing is missing

    run(keeper, body)
    assert image_pool.ready(directory) == list(SIZES)
    assert [(call.args, call.kwargs["bytes"]) for call in log.calls] == [
        (("image_pool.filled",), 6 * MIB),
        (("image_pool.filled",), 4 * MIB),
    ]


def test_what_is_wrong_is_said_once_and_tried_again_later() -> None:
    log = CapturingLogger()
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as disk:
        keeper = ImagePoolManager(log)

        async def body() -> None:
            keeper.tidy(0, Path(disk), SIZES)
            await until(lambda: log.calls)
            begun = keeper._filling
            keeper.tidy(RETRY_SECONDS - 1, Path(disk), SIZES)
            assert keeper._filling is begun
            keeper.tidy(RETRY_SECONDS, Path(disk), SIZES)
            assert keeper._filling is not begun
            await until(lambda: keeper._filling is not None and keeper._filling.done())

        run(keeper, body)
    ((said,),) = [call.kwargs.values() for call in log.calls]
    assert "is not on a tmpfs" in said


def test_closing_ends_a_filling(directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(3600)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(image_pool_manager, "MODULE", "endless")
    keeper = ImagePoolManager(CapturingLogger())

    async def body() -> None:
        keeper.tidy(0, directory, SIZES)
        await until((tmp_path / "begun").exists)

    run(keeper, body)
    assert keeper._filling is not None
    assert keeper._filling.cancelled()


def test_without_a_pool_nothing_is_done() -> None:
    keeper = ImagePoolManager(CapturingLogger())

    async def body() -> None:
        keeper.tidy(0, None, ())

    run(keeper, body)
    assert keeper._filling is None
