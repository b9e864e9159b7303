# mypy: disable-error-code="type-arg"
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CheckpointRequest(_message.Message):
    __slots__ = ("id", "path", "exit", "tcp", "rootfs_diff", "timeout_seconds", "work_path", "force", "image", "image_digest", "operation", "hold", "hold_seconds", "max_freeze_seconds", "max_freeze_from", "volumes")
    ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    TCP_FIELD_NUMBER: _ClassVar[int]
    ROOTFS_DIFF_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WORK_PATH_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    HOLD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_FREEZE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_FREEZE_FROM_FIELD_NUMBER: _ClassVar[int]
    VOLUMES_FIELD_NUMBER: _ClassVar[int]
    id: str
    path: str
    exit: bool
    tcp: str
    rootfs_diff: bool
    timeout_seconds: float
    work_path: str
    force: bool
    image: str
    image_digest: str
    operation: str
    hold: bool
    hold_seconds: float
    max_freeze_seconds: float
    max_freeze_from: str
    volumes: str
    def __init__(self, id: _Optional[str] = ..., path: _Optional[str] = ..., exit: _Optional[bool] = ..., tcp: _Optional[str] = ..., rootfs_diff: _Optional[bool] = ..., timeout_seconds: _Optional[float] = ..., work_path: _Optional[str] = ..., force: _Optional[bool] = ..., image: _Optional[str] = ..., image_digest: _Optional[str] = ..., operation: _Optional[str] = ..., hold: _Optional[bool] = ..., hold_seconds: _Optional[float] = ..., max_freeze_seconds: _Optional[float] = ..., max_freeze_from: _Optional[str] = ..., volumes: _Optional[str] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("container",)
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    container: Container
    def __init__(self, container: _Optional[_Union[Container, _Mapping]] = ...) -> None: ...

class CheckpointResponse(_message.Message):
    __slots__ = ("path", "manifest_digest", "bytes", "frozen_ms", "seconds", "steps", "held_seconds")
    PATH_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FROZEN_MS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    HELD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    path: str
    manifest_digest: str
    bytes: int
    frozen_ms: int
    seconds: float
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    held_seconds: float
    def __init__(self, path: _Optional[str] = ..., manifest_digest: _Optional[str] = ..., bytes: _Optional[int] = ..., frozen_ms: _Optional[int] = ..., seconds: _Optional[float] = ..., steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ..., held_seconds: _Optional[float] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("name", "seconds", "bytes", "spared_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SPARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    bytes: int
    spared_bytes: int
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ..., bytes: _Optional[int] = ..., spared_bytes: _Optional[int] = ...) -> None: ...

class SuspendRequest(_message.Message):
    __slots__ = ("id", "timeout_ms", "operation")
    ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    id: str
    timeout_ms: int
    operation: str
    def __init__(self, id: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., operation: _Optional[str] = ...) -> None: ...

class SuspendResponse(_message.Message):
    __slots__ = ("steps", "vram_bytes", "arena")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    VRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    vram_bytes: int
    arena: Arena
    def __init__(self, steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ..., vram_bytes: _Optional[int] = ..., arena: _Optional[_Union[Arena, _Mapping]] = ...) -> None: ...

class Arena(_message.Message):
    __slots__ = ("asked", "bytes", "reasons")
    ASKED_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    asked: bool
    bytes: int
    reasons: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, asked: _Optional[bool] = ..., bytes: _Optional[int] = ..., reasons: _Optional[_Iterable[str]] = ...) -> None: ...

class ParkRequest(_message.Message):
    __slots__ = ("id", "operation")
    ID_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    id: str
    operation: str
    def __init__(self, id: _Optional[str] = ..., operation: _Optional[str] = ...) -> None: ...

class ParkResponse(_message.Message):
    __slots__ = ("steps", "parked_bytes")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PARKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    parked_bytes: int
    def __init__(self, steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ..., parked_bytes: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("id", "timeout_ms", "room_timeout_ms", "operation")
    ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    ROOM_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    id: str
    timeout_ms: int
    room_timeout_ms: int
    operation: str
    def __init__(self, id: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., room_timeout_ms: _Optional[int] = ..., operation: _Optional[str] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("steps", "vram_bytes")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    VRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    vram_bytes: int
    def __init__(self, steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ..., vram_bytes: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("id", "operation")
    ID_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    id: str
    operation: str
    def __init__(self, id: _Optional[str] = ..., operation: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("ended", "container")
    ENDED_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    ended: Ended
    container: Container
    def __init__(self, ended: _Optional[_Union[Ended, _Mapping]] = ..., container: _Optional[_Union[Container, _Mapping]] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("operation", "verb", "outcome", "code", "error", "state", "steps", "bytes", "frozen_ms", "vram_bytes", "path", "manifest_digest", "seconds", "seconds_ago", "source")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    VERB_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FROZEN_MS_FIELD_NUMBER: _ClassVar[int]
    VRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    operation: str
    verb: str
    outcome: str
    code: str
    error: str
    state: str
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    bytes: int
    frozen_ms: int
    vram_bytes: int
    path: str
    manifest_digest: str
    seconds: float
    seconds_ago: float
    source: str
    def __init__(self, operation: _Optional[str] = ..., verb: _Optional[str] = ..., outcome: _Optional[str] = ..., code: _Optional[str] = ..., error: _Optional[str] = ..., state: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ..., bytes: _Optional[int] = ..., frozen_ms: _Optional[int] = ..., vram_bytes: _Optional[int] = ..., path: _Optional[str] = ..., manifest_digest: _Optional[str] = ..., seconds: _Optional[float] = ..., seconds_ago: _Optional[float] = ..., source: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("id", "gpu")
    ID_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    id: str
    gpu: bool
    def __init__(self, id: _Optional[str] = ..., gpu: _Optional[bool] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("containers",)
    CONTAINERS_FIELD_NUMBER: _ClassVar[int]
    containers: _containers.RepeatedCompositeFieldContainer[Container]
    def __init__(self, containers: _Optional[_Iterable[_Union[Container, _Mapping]]] = ...) -> None: ...

class Container(_message.Message):
    __slots__ = ("id", "state", "phase", "pid", "step", "done_bytes", "total_bytes", "seconds", "suspended", "cuda_pids", "gpu", "cuda", "note", "arena", "operation", "cancelling", "last", "earlier", "vram_bytes", "parked_bytes", "held_seconds", "restored_from")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SUSPENDED_FIELD_NUMBER: _ClassVar[int]
    CUDA_PIDS_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    CUDA_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    CANCELLING_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    EARLIER_FIELD_NUMBER: _ClassVar[int]
    VRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FROM_FIELD_NUMBER: _ClassVar[int]
    id: str
    state: str
    phase: str
    pid: int
    step: str
    done_bytes: int
    total_bytes: int
    seconds: float
    suspended: bool
    cuda_pids: _containers.RepeatedScalarFieldContainer[int]
    gpu: str
    cuda: _containers.RepeatedCompositeFieldContainer[CudaProcess]
    note: str
    arena: Arena
    operation: str
    cancelling: bool
    last: Ended
    earlier: _containers.RepeatedCompositeFieldContainer[Ended]
    vram_bytes: int
    parked_bytes: int
    held_seconds: float
    restored_from: str
    def __init__(self, id: _Optional[str] = ..., state: _Optional[str] = ..., phase: _Optional[str] = ..., pid: _Optional[int] = ..., step: _Optional[str] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., suspended: _Optional[bool] = ..., cuda_pids: _Optional[_Iterable[int]] = ..., gpu: _Optional[str] = ..., cuda: _Optional[_Iterable[_Union[CudaProcess, _Mapping]]] = ..., note: _Optional[str] = ..., arena: _Optional[_Union[Arena, _Mapping]] = ..., operation: _Optional[str] = ..., cancelling: _Optional[bool] = ..., last: _Optional[_Union[Ended, _Mapping]] = ..., earlier: _Optional[_Iterable[_Union[Ended, _Mapping]]] = ..., vram_bytes: _Optional[int] = ..., parked_bytes: _Optional[int] = ..., held_seconds: _Optional[float] = ..., restored_from: _Optional[str] = ...) -> None: ...

class CudaProcess(_message.Message):
    __slots__ = ("pid", "state")
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    pid: int
    state: str
    def __init__(self, pid: _Optional[int] = ..., state: _Optional[str] = ...) -> None: ...
