"""A daemon and a CUDA helper of different releases, as during an upgrade."""

from __future__ import annotations

import asyncio
import socket as socket_module
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import CapturingLogger

from kybernate_shim.cuda_helper.former_names import FORMER_NAMES, with_former_names
from kybernate_shim.gpu.errors import CudaHelperLost
from kybernate_shim.gpu.helper_answers import ArenaMoved
from kybernate_shim.gpu.helper_client import SERVICE, CudaHelper
from kybernate_shim.messages import cuda_pb2 as wire
from kybernate_shim.ttrpc import Call, Client, Method, Server

PID = (1 << 30) + 1


async def moved(request: Any, call: Call) -> wire.VerbResponse:
    return wire.VerbResponse(outcomes=[wire.Outcome(pid=pid, bytes=7) for pid in request.pids])


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


METHOD = Method(wire.VerbRequest, moved)


@pytest.mark.parametrize(("verb", "former"), [("offload", "Take"), ("reload", "Give")])
def test_daemon_uses_the_former_name_where_a_helper_has_no_other(tmp_path: Path, verb: str, former: str) -> None:
    socket = tmp_path / "cuda.sock"

    async def work() -> ArenaMoved:
        helper = CudaHelper(socket, start=False)
        try:
            done: ArenaMoved = await getattr(helper, verb)([PID], 5)
            return done
        finally:
            await helper.close()

    assert asyncio.run(with_helper({former: METHOD}, socket, work)).moved == {PID: 7}


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


def test_helper_accepts_the_former_names_and_warns_once_of_each(tmp_path: Path) -> None:
    socket, log = tmp_path / "cuda.sock", CapturingLogger()
    methods = with_former_names(dict.fromkeys(FORMER_NAMES.values(), METHOD), log)

    async def work() -> None:
        client = await Client.connect(str(socket))
        try:
            for name in [*FORMER_NAMES, *FORMER_NAMES, *FORMER_NAMES.values()]:
                reply = await client.call(SERVICE, name, wire.VerbRequest(pids=[PID]), wire.VerbResponse, timeout=5)
                assert reply.outcomes[0].bytes == 7
        finally:
            await client.close()

    asyncio.run(with_helper(methods, socket, work))
    assert [(call.method_name, call.args, call.kwargs["method"]) for call in log.calls] == [
        ("warning", ("rpc.deprecated",), former) for former in FORMER_NAMES
    ]
