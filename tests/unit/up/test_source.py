"""Models in their windows: woken when these begin, and again when they have made room for another one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kybernate.messages import agent_pb2 as wire
from kybernate.proxy.holding import Phase
from kybernate.up import source as sources
from kybernate.up.lifecycle import Done
from kybernate.up.models_file import parse
from kybernate.up.source import KeptModels, numbered
from kybernate.up.steps import Kept

ALWAYS = "models: {m: {image: x, windows: [{from: '00:00', to: '24:00'}]}}"


def test_model_that_made_room_in_its_window_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "WINDOW_SECONDS", 0.001)
    monkeypatch.setattr(sources, "AWAY_SECONDS", 0.01)
    (entry,) = parse(ALWAYS, "models.yaml", {}).models
    held = SimpleNamespace(phase=Phase.ASLEEP, model=entry, busy_until=0.0)
    room = SimpleNamespace(crowded=lambda *_: False, decided_here=lambda devices, seat: devices)
    keeper: Any = SimpleNamespace(models={"m": Kept(entry, done=Done(settled=True))}, room=room)
    woken = asyncio.Queue[str]()

    def leaves(name: str, *, makes_way: bool) -> None:
        held.phase = Phase.ASLEEP

    async def wakes(model: Any) -> None:
        held.phase = Phase.AWAKE
        woken.put_nowait(model.name)

    async def window() -> None:
        source = KeptModels(cast(Any, None), keeper, ())
        source.engine = cast(Any, SimpleNamespace(held={"m": held}, want_suspended=leaves))
        monkeypatch.setattr(source, "wake", wakes)
        keeping = asyncio.create_task(source.keep_windows())
        try:
            async with asyncio.timeout(20):
                assert await woken.get() == "m"
                source.leave("m")
                assert await woken.get() == "m"
                held.phase = Phase.ASLEEP  # on request, which is respected
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(woken.get(), 0.1)
        finally:
            keeping.cancel()

    asyncio.run(window())


def test_gpus_have_the_numbers_of_cdi_names() -> None:
    """Those of device nodes can be others, as where the kernel has found the GPUs in another order."""
    node = [
        wire.Gpu(uuid="GPU-b", index=2, pci_address="0000:65:00.0", total_bytes=80),
        wire.Gpu(uuid="GPU-a", index=3, pci_address="0000:17:00.0", total_bytes=80),
    ]
    assert [(one.uuid, one.index) for one in numbered(node)] == [("GPU-a", 0), ("GPU-b", 1)]
