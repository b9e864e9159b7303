"""What a tenant makes large is his own trouble: other containers are listed, and what is too large is named."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc
import psutil
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.field_mask_pb2 import FieldMask

from kybernate.messages import containers_pb2, containers_pb2_grpc
from kybernate.node.containerd import Containerd, RecordTooLarge
from kybernate.node.containerd_async import AsyncContainerd
from tests.hostile.tenant import Tenant
from tests.system.checkpoints import refused
from tests.system.ctr import Ctr, run

SLEEP = ("sleep", "600")
NAMESPACE = "k8s.io"
MESSAGE = 16 << 20  # bytes that containerd sends in one
VALUE = "x" * (100 << 10)  # of a variable, of which a program may have some


def listed(namespace: str) -> dict[str, str]:
    """Return the problem of each container that `kybernate ps` lists."""
    return {
        one["container"]: one["problem"] for one in json.loads(run(["kybernate", "ps", "-n", namespace, "-o", "json"]))
    }


def ids(namespace: str) -> set[str]:
    """Return what the agent lists."""

    async def all_of() -> list[str]:
        async with AsyncContainerd() as containerd:
            return await containerd.ids(namespace)

    return set(asyncio.run(all_of()))


def test_environments_of_a_tenant_keep_no_other_from_being_listed(tenant: Tenant, other_tenant: Tenant) -> None:
    env = {f"LARGE_{number}": VALUE for number in range(15)}
    pod = tenant.pod()
    large = [
        tenant.cri.run(pod, f"large-{number}", SLEEP, env=env) for number in range(MESSAGE // (len(VALUE) * 15) + 1)
    ]
    other = other_tenant.cri.run(other_tenant.pod(), "app", SLEEP)
    assert {other, *large} <= ids(NAMESPACE)
    found = listed(NAMESPACE)
    assert {id: found[id] for id in (other, *large)} == dict.fromkeys((other, *large), "")
    assert other in run(["kybernate", "status", other])


def test_container_that_is_larger_than_a_message_is_named(tenant: Tenant) -> None:
    ctr = Ctr()
    with ctr.running(*SLEEP) as other, ctr.running(*SLEEP) as large, enlarged(ctr.namespace, large):
        assert {other, large} <= ids(ctr.namespace)
        found = listed(ctr.namespace)
        assert found[other] == ""
        assert f"record of container {large} is larger" in found[large]
        assert other in run(["kybernate", "status", other])
        assert f"record of container {large} is larger" in refused("kybernate", "status", large)
    # One that CRI has made so, and that never had a task, is found by the name of its snapshot.
    env = {f"LARGE_{number}": VALUE for number in range(MESSAGE // len(VALUE) // 2 + 5)}
    idle = tenant.cri.create(tenant.pod(), "large", SLEEP, env=env)
    with Containerd() as containerd:
        assert idle in dict(containerd.records(NAMESPACE))
        with pytest.raises(RecordTooLarge):
            containerd.find(idle)


def test_record_without_task_and_snapshot_hides_no_other() -> None:
    """Only containerd knows its name, and says it in a list alone, which it cannot send."""
    ctr = Ctr()
    id = ctr.new_id("hidden.")
    headers = (("containerd-namespace", ctr.namespace),)
    with ctr.running(*SLEEP) as other, Containerd() as containerd:
        stub = containers_pb2_grpc.ContainersStub(containerd.channel)
        record = containers_pb2.Container(id=id, runtime=containers_pb2.Container.Runtime(name=ctr.runtime))
        record.spec.CopyFrom(AnyMessage(type_url="types.containerd.io/opencontainers/runtime-spec/1/Spec", value=b"{}"))
        stub.Create(containers_pb2.CreateContainerRequest(container=record), metadata=headers, timeout=20)
        try:
            with enlarged(ctr.namespace, id):
                assert {other, id} <= ids(ctr.namespace)
                assert listed(ctr.namespace)[other] == ""
                assert other in run(["kybernate", "status", other])
                assert f"record of container {id} is larger" in refused("kybernate", "status", id)
        finally:
            stub.Delete(containers_pb2.DeleteContainerRequest(id=id), metadata=headers, timeout=20)


def test_shims_that_are_stopped_keep_no_other_from_being_listed() -> None:
    """containerd waits 2 s for each, one after another; the command's call of it ends after 20 s."""
    ctr = Ctr()
    with ExitStack() as ending:
        stopped = [ending.enter_context(ctr.running(*SLEEP)) for _ in range(12)]
        other = ending.enter_context(ctr.running(*SLEEP))
        shims = [psutil.Process(ctr.pid(id)).parent() for id in stopped]
        for shim in shims:
            assert shim is not None
            shim.suspend()
            ending.callback(shim.resume)
        found = {one["container"]: one for one in json.loads(run(["kybernate", "ps", "--json"]))}
        assert found[other]["problem"] == ""
        assert {id for id in stopped if found[id]["problem"]} == set(stopped)
        assert other in run(["kybernate", "status", other])


@contextmanager
def enlarged(namespace: str, id: str) -> Iterator[None]:
    """Give the record of a container more than a message can hold, in two requests, each of which is accepted."""
    with Containerd() as containerd:
        stub = containers_pb2_grpc.ContainersStub(containerd.channel)

        def update(path: str, value: bytes) -> None:
            record = containers_pb2.Container(id=id)
            record.extensions[path.partition(".")[2]].CopyFrom(AnyMessage(type_url="test", value=value))
            request = containers_pb2.UpdateContainerRequest(container=record, update_mask=FieldMask(paths=[path]))
            try:
                stub.Update(request, metadata=(("containerd-namespace", namespace),), timeout=20)
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # noqa: PT017  # the answer has the record

        update("extensions.one", bytes(9 << 20))
        update("extensions.two", bytes(9 << 20))
        try:
            yield
        finally:
            for name in ("one", "two"):  # else no client could remove it
                update(f"extensions.{name}", b"x")
