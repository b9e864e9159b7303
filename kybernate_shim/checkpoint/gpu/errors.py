"""Why a step on a container's GPUs was not done."""

from __future__ import annotations

from kybernate_shim.errors import Refused


class GpuStepFailed(Refused):
    """A step on the GPUs failed, and the container keeps running as before."""


class NothingToSuspend(Refused):
    """No process of the container holds CUDA state."""


class NothingToResume(Refused):
    """No process of the container waits for its GPU."""
