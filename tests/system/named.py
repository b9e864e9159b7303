"""Operations that a client names, as a durable one does: begun, asked about, repeated and cancelled by their names."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.ttrpc import Client, Code, RpcError
from tests.system.checkpoints import ask, in_background
from tests.system.ctr import Ctr, eventually

SERVICE = "kybernate.shim.v1.Shim"
SECONDS = 120.0
KINDS: dict[str, tuple[Any, Any]] = {
    "Checkpoint": (wire.CheckpointRequest, wire.CheckpointResponse),
    "Suspend": (wire.SuspendRequest, wire.SuspendResponse),
    "Resume": (wire.ResumeRequest, wire.ResumeResponse),
    "Cancel": (wire.CancelRequest, wire.CancelResponse),
    "Status": (wire.StatusRequest, wire.StatusResponse),
}


def call(ctr: Ctr, id: str, method: str, **fields: Any) -> Any:
    """Make a call of the container's shim. Raises RpcError."""
    request, reply = KINDS[method]

    async def talk(client: Client) -> Any:
        return await client.call(SERVICE, method, request(id=id, **fields), reply, timeout=SECONDS)

    return ask(ctr.namespace, id, talk)


@contextmanager
def begun(ctr: Ctr, id: str, method: str, operation: str, **fields: Any) -> Iterator[Future[Any]]:
    """Have an operation run in parallel with the block, which begins when the shim says that it runs."""
    with in_background(lambda: call(ctr, id, method, operation=operation, **fields)) as work:
        eventually(lambda: work.done() or status(ctr, id).operation == operation, pause=0.005)
        yield work


def save_begun(ctr: Ctr, id: str, operation: str, image: Path, **fields: Any) -> Any:
    return begun(ctr, id, "Checkpoint", operation, path=str(image), rootfs_diff=True, **fields)


def status(ctr: Ctr, id: str, *, gpu: bool = False) -> wire.Container:
    (container,) = call(ctr, id, "Status", gpu=gpu).containers
    assert isinstance(container, wire.Container)
    return container


def cancel(ctr: Ctr, id: str, operation: str = "") -> wire.CancelResponse:
    answer = call(ctr, id, "Cancel", operation=operation)
    assert isinstance(answer, wire.CancelResponse)
    return answer


def cancelled_or_done(ctr: Ctr, id: str, operation: str) -> str:
    """Cancel an operation that may be done by now, and return how it has ended: "cancelled" or "succeeded"."""
    try:
        outcome = cancel(ctr, id, operation).ended.outcome
    except RpcError as error:
        if error.code is not Code.FAILED_PRECONDITION:
            raise
        outcome = status(ctr, id).last.outcome
    assert outcome in ("cancelled", "succeeded")
    return outcome


def cancelled(work: Future[Any]) -> str:
    """Return the text of the error of an operation that a client has cancelled."""
    error = work.exception(SECONDS)
    assert isinstance(error, RpcError), repr(error or work.result())
    assert error.code is Code.CANCELED, str(error)
    return error.message


def in_step(ctr: Ctr, id: str, step: str) -> None:
    """Wait until the operation that runs is in that step."""
    eventually(lambda: status(ctr, id).step == step, pause=0.002)
