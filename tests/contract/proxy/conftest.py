"""Tests here are coroutines: each runs in an event loop of its own, over each data plane."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.contract.proxy.stand import PLANES, Stand, standing

SECONDS = 60.0

Standing = Callable[..., AbstractAsyncContextManager[Stand]]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def within_time() -> None:
        async with asyncio.timeout(SECONDS):
            await pyfuncitem.obj(**arguments)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(within_time())
    return True


@pytest.fixture(params=PLANES)
def plane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def standing_proxy(plane: str, tmp_path: Path) -> Standing:
    """Starts a proxy of this plane before upstreams of the test."""
    return partial(standing, plane=plane, place=tmp_path)


@pytest.fixture
def embedded_proxy(tmp_path: Path) -> Standing:
    """Starts one of the embedded plane, for what is its own."""
    return partial(standing, plane="embedded", place=tmp_path)


Anything = Any
Iterating = AsyncIterator[Anything]
