"""A swap of two shims: the side that has failed ends the other, whose end would be far away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kybernate.node import swap as swapping
from kybernate.node.failure import Failure
from kybernate.node.lookup import KnownContainer
from kybernate.node.shim import NothingToCancel, ShimRefused
from kybernate.node.swap import NotSwapped, swap

FAILURE = Failure("GPU-1 has 1 GiB free")


class PretendedShim:
    """Fails its operation, or works on it until that is cancelled."""

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails
        self.begun, self.cancelled = asyncio.Event(), asyncio.Event()
        self.other: PretendedShim | None = None

    async def resume(self, request: Any) -> Any:
        return await self._operation()

    async def suspend(self, request: Any) -> Any:
        return await self._operation()

    async def _operation(self) -> Any:
        self.begun.set()
        assert self.other is not None
        if self._fails:
            await self.other.begun.wait()
            raise FAILURE
        await self.cancelled.wait()
        raise ShimRefused("it was cancelled", code="CANCELED")

    async def status(self, id: str) -> Any:
        return [SimpleNamespace(phase="resume")]

    async def cancel(self, id: str, operation: str) -> None:
        self.cancelled.set()


@pytest.mark.parametrize("failing", ["out", "back"])
def test_side_that_failed_ends_the_other(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    async def main() -> NotSwapped:
        shims = {name: PretendedShim(fails=name == failing) for name in ("out", "back")}
        shims["out"].other, shims["back"].other = shims["back"], shims["out"]

        @asynccontextmanager
        async def shim_of(container: KnownContainer, address: str) -> AsyncIterator[PretendedShim]:
            yield shims[container.id]

        monkeypatch.setattr(swapping, "shim_of", shim_of)
        out, back = (
            cast("KnownContainer", SimpleNamespace(namespace="default", id=name, title=name)) for name in shims
        )
        with pytest.raises(NotSwapped) as caught:
            await swap(out, back, "", wait=600)
        assert shims["out" if failing == "back" else "back"].cancelled.is_set()
        return caught.value

    error = asyncio.run(main())
    assert error.undone
    assert str(FAILURE) in str(error)
    assert error.state == ("back stays suspended" if failing == "out" else "out keeps running")


class BusyShim:
    """Suspends or not, and resumes without a wait."""

    def __init__(self, *, state: str = "running", fails: bool = False) -> None:
        self.container = SimpleNamespace(phase="", state=state, suspended=not fails)
        self.fails = fails

    async def resume(self, request: Any) -> None:
        self.container.suspended = False

    async def suspend(self, request: Any) -> None:
        await asyncio.sleep(0)
        if self.fails:
            raise FAILURE
        self.container.suspended = True

    async def status(self, id: str) -> Any:
        return [self.container]

    async def cancel(self, id: str, operation: str) -> None:
        raise NothingToCancel("it has ended", code="FAILED_PRECONDITION")


@pytest.mark.parametrize(("state", "active"), [("running", ["out"]), ("stopped", ["back"])])
def test_one_side_is_active_when_the_other_came_before_a_suspend_failed(
    monkeypatch: pytest.MonkeyPatch, state: str, active: list[str]
) -> None:
    async def main() -> None:
        shims = {"out": BusyShim(state=state, fails=True), "back": BusyShim()}

        @asynccontextmanager
        async def shim_of(container: KnownContainer, address: str) -> AsyncIterator[BusyShim]:
            yield shims[container.id]

        monkeypatch.setattr(swapping, "shim_of", shim_of)
        out, back = (
            cast("KnownContainer", SimpleNamespace(namespace="default", id=name, title=name)) for name in shims
        )
        with pytest.raises(NotSwapped) as caught:
            await swap(out, back, "", wait=600)
        assert caught.value.undone == (state == "running")
        found = {name: shim.container for name, shim in shims.items()}
        assert [name for name, one in found.items() if one.state == "running" and not one.suspended] == active

    asyncio.run(main())
