"""What can go wrong with a CUDA call. Each message says what failed, why, how things are now and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kybernate_shim.arena.refusals import ArenaRefusal

# What follows from a refusal, by verb and the driver's error. Source: measured with driver 580.159.04 on an H100.
_CONSEQUENCES: Mapping[tuple[str, str], str] = {
    ("lock", "CUDA_ERROR_NOT_READY"): (
        "its queued work did not drain in time, and it keeps running; allow a longer timeout or try again later"
    ),
    ("restore", "CUDA_ERROR_OUT_OF_MEMORY"): (
        "its GPU does not have enough free memory, and the driver cannot try again: end the process and restore it "
        "from a checkpoint image"
    ),
    ("restore", "CUDA_ERROR_NOT_SUPPORTED"): (
        "a GPU that it could open is closed to it now, or it used something that the driver checkpoints and cannot "
        "restore, such as managed memory or peer access: give it its GPUs, or end the process"
    ),
    ("restore", "CUDA_ERROR_INVALID_VALUE"): (
        "it is still checkpointed; a GPU map must name every GPU that the process could open, exactly once on each "
        "side, and a restore without a map goes back to where it was"
    ),
    ("restore", "CUDA_ERROR_OPERATING_SYSTEM"): (
        "an earlier restore of it has failed, or it has ended; the driver cannot restore it: end the process"
    ),
}
_BY_ERROR: Mapping[str, str] = {
    "CUDA_ERROR_ILLEGAL_STATE": (
        "it is not in the state that this step requires, and nothing was changed; `kybernate cuda state` shows its"
        " state"
    ),
    "CUDA_ERROR_NOT_INITIALIZED": "it holds no CUDA state",
    ArenaRefusal.FAILED: "its memory is where it was",
    ArenaRefusal.AWAY: (
        "its memory is in the node's arena, and it stays locked until that can be given back: `kybernate resume` tries "
        "again, when its GPU has room"
    ),
    "CUDA_ERROR_OPERATING_SYSTEM": "there is no such process, or its driver no longer answers",
}
_UNKNOWN_CONSEQUENCE = "its state is what `kybernate cuda state` shows"


@dataclass(frozen=True)
class GpuPair:
    """Where a process moves at its restore: from the GPU `old` to the GPU `new`, by UUID ("GPU-…")."""

    old: str
    new: str


class CudaError(Exception):
    """Something about CUDA failed; never raised itself."""


class CudaUnavailable(CudaError):
    """The helper or the driver cannot be used on this node: nothing has been asked of any process."""


class CudaHelperLost(CudaError):
    """The helper ended in the middle of a call; each process may or may not have got it. Ask for the states."""


def cuda_processes_keep_appearing(pids: Sequence[int], seconds: float) -> CudaError:
    """Return the error: new processes of the container kept initializing CUDA while the others were being locked."""
    return CudaError(
        f"processes kept initializing CUDA for {seconds:g} s while the container was being locked, the last ones "
        f"are {', '.join(map(str, pids))}; try again when it has started up"
    )


def cuda_memory_imported(pid: int) -> CudaError:
    """Return the error: a process imported memory of another one after the look at what would be lost."""
    return CudaError(
        f"process {pid} imported memory of another process while the container was being locked, and the driver"
        " would not restore it; try again when the process has released that"
    )


class CudaCallFailed(CudaError):
    """A call on one process failed. `done` names the processes on which the same call succeeded."""

    def __init__(self, message: str, *, done: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.done = tuple(done)


def cuda_call_failed(verb: str, pid: int, name: str, text: str, *, done: Sequence[int] = ()) -> CudaCallFailed:
    """Return the error: the driver, or what calls it, has refused a call with the error `name`."""
    consequence = _CONSEQUENCES.get((verb, name)) or _BY_ERROR.get(name) or _UNKNOWN_CONSEQUENCE
    return CudaCallFailed(f"CUDA {verb} of process {pid} failed: {name} ({text}); {consequence}", done=done)


def cuda_call_unanswered(verb: str, pid: int, seconds: float, *, done: Sequence[int] = ()) -> CudaCallFailed:
    """Return the error: a call on one process was not answered in time, and the worker that waited was killed."""
    return CudaCallFailed(
        f"CUDA {verb} of process {pid} was not answered within {seconds:g} s and was abandoned; the driver may still"
        " execute it, `kybernate cuda state` shows its state. A stopped or frozen process never answers: thaw it",
        done=done,
    )


def join(errors: Sequence[CudaError]) -> CudaError:
    """Return the first of several errors of one call, with the others as its notes."""
    for other in errors[1:]:
        errors[0].add_note(f"also: {other}")
    return errors[0]
