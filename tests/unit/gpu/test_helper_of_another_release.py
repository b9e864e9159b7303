"""A daemon and a CUDA helper of different releases, as during an upgrade."""

from __future__ import annotations

import asyncio
import socket as socket_module
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.gpu.errors import CudaHelperLost
from kybernate_shim.gpu.helper_client import SERVICE, CudaHelper
from kybernate_shim.ttrpc import Method, Server

PID = (1 << 30) + 1


async def with_helper(methods: Mapping[str, Method], socket: Path, work: Any) -> Any:
    server = Server({SERVICE: methods})
    with socket_module.socket(socket_module.AF_UNIX) as listener:
        listener.bind(str(socket))
        listener.listen()
        await server.start(listener)
        try:
            return await work()
        finally:
            await server.close()


def test_method_that_a_helper_lacks_is_an_error(tmp_path: Path) -> None:
    socket = tmp_path / "cuda.sock"

    async def work() -> None:
        helper = CudaHelper(socket, start=False)
        try:
            await helper.lock([PID], 5)
        finally:
            await helper.close()

    with pytest.raises(CudaHelperLost, match="not implemented"):
        asyncio.run(with_helper({}, socket, work))
