"""The workers' answers as messages of kybernate.cuda.v1.Cuda."""

from __future__ import annotations

from typing import TypeVar

from kybernate_shim.cuda_helper import workers as pool
from kybernate_shim.linux.kernel_text import plain
from kybernate_shim.messages import cuda_pb2 as wire
from kybernate_shim.worker_protocol.cuda_jobs import DriverAnswer, DriverGpu

A = TypeVar("A", bound=DriverAnswer)


def device(gpu: DriverGpu) -> wire.Device:
    """Return a GPU as the driver and NVML describe it."""
    described = wire.Device(uuid=gpu.uuid, name=gpu.name, total_bytes=gpu.total_bytes, numa_node=gpu.numa_node)
    described.links.extend(wire.Link(uuid=uuid, path=path) for uuid, path in gpu.links.items())
    if (memory := gpu.memory) is not None:
        described.free_known, described.free_bytes = True, memory.free_bytes
        described.mig, described.number = memory.mig, memory.number
        described.holdings.extend(wire.Holding(pid=pid, bytes=size) for pid, size in memory.holdings.items())
        described.computed_known, described.sampled_microseconds = memory.computed is not None, memory.sampled
        described.computed.extend(
            wire.Computed(pid=pid, microseconds=time) for pid, time in (memory.computed or {}).items()
        )
    return described


def outcome_of(pid: int, results: pool.Results[A], seconds: float) -> wire.Outcome:
    """Return what became of a process in a call that had `seconds` for all of its processes."""
    if (answer := results.answers.get(pid)) is not None:
        kind = wire.Outcome.REFUSED if answer.code else wire.Outcome.DONE
        return wire.Outcome(
            pid=pid, kind=kind, code=answer.code, name=answer.name, text=answer.text, seconds=answer.seconds
        )
    if results.timed_out:
        return wire.Outcome(pid=pid, kind=wire.Outcome.DEADLINE, text=f"no answer after {seconds:g} s", seconds=seconds)
    return wire.Outcome(pid=pid, kind=wire.Outcome.WORKER_DIED, text=plain(results.failure))
