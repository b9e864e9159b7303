# mypy: disable-error-code="type-arg"
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CheckpointRequest(_message.Message):
    __slots__ = ("id", "path", "exit", "tcp", "rootfs_diff", "timeout_seconds", "work_path", "force", "image", "image_digest")
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
    def __init__(self, id: _Optional[str] = ..., path: _Optional[str] = ..., exit: _Optional[bool] = ..., tcp: _Optional[str] = ..., rootfs_diff: _Optional[bool] = ..., timeout_seconds: _Optional[float] = ..., work_path: _Optional[str] = ..., force: _Optional[bool] = ..., image: _Optional[str] = ..., image_digest: _Optional[str] = ...) -> None: ...

class CheckpointResponse(_message.Message):
    __slots__ = ("path", "manifest_digest", "bytes", "frozen_ms", "seconds", "steps")
    PATH_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FROZEN_MS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    path: str
    manifest_digest: str
    bytes: int
    frozen_ms: int
    seconds: float
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    def __init__(self, path: _Optional[str] = ..., manifest_digest: _Optional[str] = ..., bytes: _Optional[int] = ..., frozen_ms: _Optional[int] = ..., seconds: _Optional[float] = ..., steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ...) -> None: ...

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
    __slots__ = ("id", "timeout_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    id: str
    timeout_ms: int
    def __init__(self, id: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class SuspendResponse(_message.Message):
    __slots__ = ("steps", "vram_bytes")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    VRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    vram_bytes: int
    def __init__(self, steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ..., vram_bytes: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("id", "timeout_ms", "room_timeout_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    ROOM_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    id: str
    timeout_ms: int
    room_timeout_ms: int
    def __init__(self, id: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., room_timeout_ms: _Optional[int] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("steps", "vram_bytes")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    VRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    vram_bytes: int
    def __init__(self, steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ..., vram_bytes: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("containers",)
    CONTAINERS_FIELD_NUMBER: _ClassVar[int]
    containers: _containers.RepeatedCompositeFieldContainer[Container]
    def __init__(self, containers: _Optional[_Iterable[_Union[Container, _Mapping]]] = ...) -> None: ...

class Container(_message.Message):
    __slots__ = ("id", "state", "phase", "pid", "step", "done_bytes", "total_bytes", "seconds", "suspended", "cuda_pids")
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
    def __init__(self, id: _Optional[str] = ..., state: _Optional[str] = ..., phase: _Optional[str] = ..., pid: _Optional[int] = ..., step: _Optional[str] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., suspended: _Optional[bool] = ..., cuda_pids: _Optional[_Iterable[int]] = ...) -> None: ...
