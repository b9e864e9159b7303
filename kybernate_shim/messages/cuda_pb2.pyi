# mypy: disable-error-code="type-arg"
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNKNOWN: _ClassVar[State]
    RUNNING: _ClassVar[State]
    LOCKED: _ClassVar[State]
    CHECKPOINTED: _ClassVar[State]
    FAILED: _ClassVar[State]
UNKNOWN: State
RUNNING: State
LOCKED: State
CHECKPOINTED: State
FAILED: State

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoResponse(_message.Message):
    __slots__ = ("driver_version", "api_version", "devices", "missing_calls")
    DRIVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    API_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    MISSING_CALLS_FIELD_NUMBER: _ClassVar[int]
    driver_version: str
    api_version: int
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    missing_calls: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, driver_version: _Optional[str] = ..., api_version: _Optional[int] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., missing_calls: _Optional[_Iterable[str]] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("uuid", "name", "total_bytes", "free_bytes", "free_known", "mig", "number", "holdings", "numa_node", "computed_known", "computed", "links", "sampled_microseconds")
    UUID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_KNOWN_FIELD_NUMBER: _ClassVar[int]
    MIG_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_KNOWN_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    free_known: bool
    mig: bool
    number: int
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    numa_node: int
    computed_known: bool
    computed: _containers.RepeatedCompositeFieldContainer[Computed]
    links: _containers.RepeatedCompositeFieldContainer[Link]
    sampled_microseconds: int
    def __init__(self, uuid: _Optional[str] = ..., name: _Optional[str] = ..., total_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., free_known: _Optional[bool] = ..., mig: _Optional[bool] = ..., number: _Optional[int] = ..., holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ..., numa_node: _Optional[int] = ..., computed_known: _Optional[bool] = ..., computed: _Optional[_Iterable[_Union[Computed, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[Link, _Mapping]]] = ..., sampled_microseconds: _Optional[int] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("uuid", "path")
    UUID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    path: str
    def __init__(self, uuid: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class Computed(_message.Message):
    __slots__ = ("pid", "microseconds")
    PID_FIELD_NUMBER: _ClassVar[int]
    MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    pid: int
    microseconds: int
    def __init__(self, pid: _Optional[int] = ..., microseconds: _Optional[int] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("pid", "bytes")
    PID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    pid: int
    bytes: int
    def __init__(self, pid: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class StatesRequest(_message.Message):
    __slots__ = ("pids", "timeout_ms")
    PIDS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    pids: _containers.RepeatedScalarFieldContainer[int]
    timeout_ms: int
    def __init__(self, pids: _Optional[_Iterable[int]] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class StatesResponse(_message.Message):
    __slots__ = ("processes", "unknown")
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedCompositeFieldContainer[Process]
    unknown: _containers.RepeatedCompositeFieldContainer[Outcome]
    def __init__(self, processes: _Optional[_Iterable[_Union[Process, _Mapping]]] = ..., unknown: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ...) -> None: ...

class Process(_message.Message):
    __slots__ = ("pid", "state", "restore_thread", "arena_bytes")
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESTORE_THREAD_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    pid: int
    state: State
    restore_thread: int
    arena_bytes: int
    def __init__(self, pid: _Optional[int] = ..., state: _Optional[_Union[State, str]] = ..., restore_thread: _Optional[int] = ..., arena_bytes: _Optional[int] = ...) -> None: ...

class VerbRequest(_message.Message):
    __slots__ = ("pids", "timeout_ms", "threads_stopped", "room_gpu_uuid", "room_ms")
    PIDS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    THREADS_STOPPED_FIELD_NUMBER: _ClassVar[int]
    ROOM_GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    ROOM_MS_FIELD_NUMBER: _ClassVar[int]
    pids: _containers.RepeatedScalarFieldContainer[int]
    timeout_ms: int
    threads_stopped: bool
    room_gpu_uuid: str
    room_ms: int
    def __init__(self, pids: _Optional[_Iterable[int]] = ..., timeout_ms: _Optional[int] = ..., threads_stopped: _Optional[bool] = ..., room_gpu_uuid: _Optional[str] = ..., room_ms: _Optional[int] = ...) -> None: ...

class ExpectRequest(_message.Message):
    __slots__ = ("pid", "timeout_ms", "gpu_uuids")
    PID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    GPU_UUIDS_FIELD_NUMBER: _ClassVar[int]
    pid: int
    timeout_ms: int
    gpu_uuids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pid: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., gpu_uuids: _Optional[_Iterable[str]] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("pid", "timeout_ms", "gpu_uuid", "free_bytes", "room_comes")
    PID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROOM_COMES_FIELD_NUMBER: _ClassVar[int]
    pid: int
    timeout_ms: int
    gpu_uuid: str
    free_bytes: int
    room_comes: bool
    def __init__(self, pid: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., gpu_uuid: _Optional[str] = ..., free_bytes: _Optional[int] = ..., room_comes: _Optional[bool] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("pids", "timeout_ms", "gpu_pairs")
    PIDS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    GPU_PAIRS_FIELD_NUMBER: _ClassVar[int]
    pids: _containers.RepeatedScalarFieldContainer[int]
    timeout_ms: int
    gpu_pairs: _containers.RepeatedCompositeFieldContainer[GpuPair]
    def __init__(self, pids: _Optional[_Iterable[int]] = ..., timeout_ms: _Optional[int] = ..., gpu_pairs: _Optional[_Iterable[_Union[GpuPair, _Mapping]]] = ...) -> None: ...

class GpuPair(_message.Message):
    __slots__ = ("old_uuid", "new_uuid")
    OLD_UUID_FIELD_NUMBER: _ClassVar[int]
    NEW_UUID_FIELD_NUMBER: _ClassVar[int]
    old_uuid: str
    new_uuid: str
    def __init__(self, old_uuid: _Optional[str] = ..., new_uuid: _Optional[str] = ...) -> None: ...

class VerbResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("pid", "kind", "code", "name", "text", "seconds", "bytes", "spared_bytes")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        DONE: _ClassVar[Outcome.Kind]
        REFUSED: _ClassVar[Outcome.Kind]
        DEADLINE: _ClassVar[Outcome.Kind]
        WORKER_DIED: _ClassVar[Outcome.Kind]
    DONE: Outcome.Kind
    REFUSED: Outcome.Kind
    DEADLINE: Outcome.Kind
    WORKER_DIED: Outcome.Kind
    PID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SPARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    pid: int
    kind: Outcome.Kind
    code: int
    name: str
    text: str
    seconds: float
    bytes: int
    spared_bytes: int
    def __init__(self, pid: _Optional[int] = ..., kind: _Optional[_Union[Outcome.Kind, str]] = ..., code: _Optional[int] = ..., name: _Optional[str] = ..., text: _Optional[str] = ..., seconds: _Optional[float] = ..., bytes: _Optional[int] = ..., spared_bytes: _Optional[int] = ...) -> None: ...
