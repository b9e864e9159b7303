"""The tasks of a namespace, without waiting for shims that do not answer.

containerd's List asks one shim after another, and waits 2 s for each that is silent: one tenant whose shim is stopped
would delay all others. So a list that has not come soon is replaced by a question for each task, all at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from kybernate.messages import tasks_pb2
from kybernate_shim.messages import process_pb2

WHOLE_SECONDS = 1.0  # for one list of all
EACH_SECONDS = 4.0  # for all questions together: containerd gives up on a shim after 2 s, and says UNKNOWN of it
CONCURRENT = 256  # questions: streams of a connection

Tasks = dict[str, process_pb2.Process]


def tasks_of(
    stub: Any,
    ids: Callable[[], Iterable[str]],
    headers: Any,
    *,
    whole_seconds: float = WHOLE_SECONDS,
    each_seconds: float = EACH_SECONDS,
) -> Tasks:
    """Return the tasks by their containers' ids; one whose shim does not answer in time is of status UNKNOWN.

    `ids` returns the containers that may have one, and is called where the list does not come. Raises grpc.RpcError.
    """
    try:
        reply = stub.List(tasks_pb2.ListTasksRequest(), metadata=headers, timeout=whole_seconds)
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        return _one_by_one(stub, list(ids()), headers, each_seconds)
    return {task.container_id or task.id: task for task in reply.tasks}


def _one_by_one(stub: Any, ids: list[str], headers: Any, seconds: float) -> Tasks:
    found: Tasks = {}
    end = time.monotonic() + seconds
    asked: dict[str, Any] = {}
    for id in ids:
        if len(asked) >= CONCURRENT:
            first = next(iter(asked))
            _take(found, first, asked.pop(first))
        left = max(0.001, end - time.monotonic())
        asked[id] = stub.Get.future(tasks_pb2.GetRequest(container_id=id), metadata=headers, timeout=left)
    for id, answer in asked.items():
        _take(found, id, answer)
    return found


def _take(found: Tasks, id: str, answer: Any) -> None:
    try:
        found[id] = answer.result().process
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.NOT_FOUND:
            return
        if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        found[id] = process_pb2.Process(container_id=id, status=process_pb2.UNKNOWN)
