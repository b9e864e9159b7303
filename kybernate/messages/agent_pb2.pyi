# mypy: disable-error-code="type-arg"
import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Bookmark(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BOOKMARK_UNSPECIFIED: _ClassVar[Bookmark]
    BOOKMARK_SNAPSHOT_BEGIN: _ClassVar[Bookmark]
    BOOKMARK_SNAPSHOT_END: _ClassVar[Bookmark]

class OperationState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATION_STATE_UNSPECIFIED: _ClassVar[OperationState]
    PENDING: _ClassVar[OperationState]
    RUNNING: _ClassVar[OperationState]
    CANCELLING: _ClassVar[OperationState]
    SUCCEEDED: _ClassVar[OperationState]
    FAILED: _ClassVar[OperationState]
    CANCELLED: _ClassVar[OperationState]

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    COMPLETE: _ClassVar[ReplicaState]
    COPYING: _ClassVar[ReplicaState]
    DAMAGED: _ClassVar[ReplicaState]
    MISSING: _ClassVar[ReplicaState]
BOOKMARK_UNSPECIFIED: Bookmark
BOOKMARK_SNAPSHOT_BEGIN: Bookmark
BOOKMARK_SNAPSHOT_END: Bookmark
OPERATION_STATE_UNSPECIFIED: OperationState
PENDING: OperationState
RUNNING: OperationState
CANCELLING: OperationState
SUCCEEDED: OperationState
FAILED: OperationState
CANCELLED: OperationState
REPLICA_STATE_UNSPECIFIED: ReplicaState
COMPLETE: ReplicaState
COPYING: ReplicaState
DAMAGED: ReplicaState
MISSING: ReplicaState

class GetNodeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Node(_message.Message):
    __slots__ = ("name", "gpus", "memory", "tiers", "versions", "findings", "started", "instance")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    gpus: _containers.RepeatedCompositeFieldContainer[Gpu]
    memory: HostMemory
    tiers: _containers.RepeatedCompositeFieldContainer[Tier]
    versions: _containers.ScalarMap[str, str]
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    started: _timestamp_pb2.Timestamp
    instance: str
    def __init__(self, name: _Optional[str] = ..., gpus: _Optional[_Iterable[_Union[Gpu, _Mapping]]] = ..., memory: _Optional[_Union[HostMemory, _Mapping]] = ..., tiers: _Optional[_Iterable[_Union[Tier, _Mapping]]] = ..., versions: _Optional[_Mapping[str, str]] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ..., started: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., instance: _Optional[str] = ...) -> None: ...

class Gpu(_message.Message):
    __slots__ = ("uuid", "index", "model", "numa_node", "total_bytes", "used_bytes", "free_bytes", "pci_address", "shares")
    UUID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PCI_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    index: int
    model: str
    numa_node: int
    total_bytes: int
    used_bytes: int
    free_bytes: int
    pci_address: str
    shares: _containers.RepeatedCompositeFieldContainer[Share]
    def __init__(self, uuid: _Optional[str] = ..., index: _Optional[int] = ..., model: _Optional[str] = ..., numa_node: _Optional[int] = ..., total_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., pci_address: _Optional[str] = ..., shares: _Optional[_Iterable[_Union[Share, _Mapping]]] = ...) -> None: ...

class Share(_message.Message):
    __slots__ = ("namespace", "container", "bytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    container: str
    bytes: int
    def __init__(self, namespace: _Optional[str] = ..., container: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class HostMemory(_message.Message):
    __slots__ = ("total_bytes", "available_bytes", "arena_bytes", "arena_used_bytes")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    available_bytes: int
    arena_bytes: int
    arena_used_bytes: int
    def __init__(self, total_bytes: _Optional[int] = ..., available_bytes: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., arena_used_bytes: _Optional[int] = ...) -> None: ...

class Tier(_message.Message):
    __slots__ = ("name", "path", "capacity_bytes", "used_bytes", "free_bytes", "images")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    images: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., images: _Optional[int] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("check", "level", "message", "advice")
    CHECK_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    check: str
    level: str
    message: str
    advice: str
    def __init__(self, check: _Optional[str] = ..., level: _Optional[str] = ..., message: _Optional[str] = ..., advice: _Optional[str] = ...) -> None: ...

class ListContainersRequest(_message.Message):
    __slots__ = ("namespace", "all")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    all: bool
    def __init__(self, namespace: _Optional[str] = ..., all: _Optional[bool] = ...) -> None: ...

class ListContainersResponse(_message.Message):
    __slots__ = ("containers", "revision")
    CONTAINERS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    containers: _containers.RepeatedCompositeFieldContainer[Container]
    revision: int
    def __init__(self, containers: _Optional[_Iterable[_Union[Container, _Mapping]]] = ..., revision: _Optional[int] = ...) -> None: ...

class GetContainerRequest(_message.Message):
    __slots__ = ("name", "namespace")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace: str
    def __init__(self, name: _Optional[str] = ..., namespace: _Optional[str] = ...) -> None: ...

class Container(_message.Message):
    __slots__ = ("namespace", "id", "title", "pod_namespace", "pod", "name", "image", "runtime", "state", "pid", "gpu", "operation", "vram_bytes", "arena_bytes", "parked_bytes", "note", "problem", "sandbox", "workload", "gpu_uuids", "started", "restored_from", "foreign", "pod_uid", "labels", "pod_ip", "in_flight", "waits_for", "active_until")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NO_TASK: _ClassVar[Container.State]
        CREATED: _ClassVar[Container.State]
        RUNNING: _ClassVar[Container.State]
        PAUSING: _ClassVar[Container.State]
        PAUSED: _ClassVar[Container.State]
        HELD: _ClassVar[Container.State]
        STOPPED: _ClassVar[Container.State]
        UNKNOWN: _ClassVar[Container.State]
    NO_TASK: Container.State
    CREATED: Container.State
    RUNNING: Container.State
    PAUSING: Container.State
    PAUSED: Container.State
    HELD: Container.State
    STOPPED: Container.State
    UNKNOWN: Container.State
    class GpuState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NO_GPU: _ClassVar[Container.GpuState]
        ATTACHED: _ClassVar[Container.GpuState]
        SUSPENDING: _ClassVar[Container.GpuState]
        SUSPENDED: _ClassVar[Container.GpuState]
        PARKING: _ClassVar[Container.GpuState]
        RESUMING: _ClassVar[Container.GpuState]
        CHECKPOINTING: _ClassVar[Container.GpuState]
        RESTORING: _ClassVar[Container.GpuState]
        STUCK: _ClassVar[Container.GpuState]
        OTHER: _ClassVar[Container.GpuState]
    NO_GPU: Container.GpuState
    ATTACHED: Container.GpuState
    SUSPENDING: Container.GpuState
    SUSPENDED: Container.GpuState
    PARKING: Container.GpuState
    RESUMING: Container.GpuState
    CHECKPOINTING: Container.GpuState
    RESTORING: Container.GpuState
    STUCK: Container.GpuState
    OTHER: Container.GpuState
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    POD_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    VRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    GPU_UUIDS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FROM_FIELD_NUMBER: _ClassVar[int]
    FOREIGN_FIELD_NUMBER: _ClassVar[int]
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    POD_IP_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_UNTIL_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    id: str
    title: str
    pod_namespace: str
    pod: str
    name: str
    image: str
    runtime: str
    state: Container.State
    pid: int
    gpu: Container.GpuState
    operation: str
    vram_bytes: int
    arena_bytes: int
    parked_bytes: int
    note: str
    problem: str
    sandbox: bool
    workload: str
    gpu_uuids: _containers.RepeatedScalarFieldContainer[str]
    started: _timestamp_pb2.Timestamp
    restored_from: str
    foreign: bool
    pod_uid: str
    labels: _containers.ScalarMap[str, str]
    pod_ip: str
    in_flight: int
    waits_for: str
    active_until: _timestamp_pb2.Timestamp
    def __init__(self, namespace: _Optional[str] = ..., id: _Optional[str] = ..., title: _Optional[str] = ..., pod_namespace: _Optional[str] = ..., pod: _Optional[str] = ..., name: _Optional[str] = ..., image: _Optional[str] = ..., runtime: _Optional[str] = ..., state: _Optional[_Union[Container.State, str]] = ..., pid: _Optional[int] = ..., gpu: _Optional[_Union[Container.GpuState, str]] = ..., operation: _Optional[str] = ..., vram_bytes: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., parked_bytes: _Optional[int] = ..., note: _Optional[str] = ..., problem: _Optional[str] = ..., sandbox: _Optional[bool] = ..., workload: _Optional[str] = ..., gpu_uuids: _Optional[_Iterable[str]] = ..., started: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., restored_from: _Optional[str] = ..., foreign: _Optional[bool] = ..., pod_uid: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., pod_ip: _Optional[str] = ..., in_flight: _Optional[int] = ..., waits_for: _Optional[str] = ..., active_until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ReadLogRequest(_message.Message):
    __slots__ = ("name", "namespace", "lines", "follow")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace: str
    lines: int
    follow: bool
    def __init__(self, name: _Optional[str] = ..., namespace: _Optional[str] = ..., lines: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class LogLines(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedCompositeFieldContainer[LogLine]
    def __init__(self, lines: _Optional[_Iterable[_Union[LogLine, _Mapping]]] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("time", "stream", "text", "cut")
    TIME_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    time: _timestamp_pb2.Timestamp
    stream: str
    text: str
    cut: bool
    def __init__(self, time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., stream: _Optional[str] = ..., text: _Optional[str] = ..., cut: _Optional[bool] = ...) -> None: ...

class ListSeatsRequest(_message.Message):
    __slots__ = ("all",)
    ALL_FIELD_NUMBER: _ClassVar[int]
    all: bool
    def __init__(self, all: _Optional[bool] = ...) -> None: ...

class ListSeatsResponse(_message.Message):
    __slots__ = ("seats", "revision")
    SEATS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    seats: _containers.RepeatedCompositeFieldContainer[Seat]
    revision: int
    def __init__(self, seats: _Optional[_Iterable[_Union[Seat, _Mapping]]] = ..., revision: _Optional[int] = ...) -> None: ...

class GetSeatRequest(_message.Message):
    __slots__ = ("name", "namespace")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace: str
    def __init__(self, name: _Optional[str] = ..., namespace: _Optional[str] = ...) -> None: ...

class Seat(_message.Message):
    __slots__ = ("name", "profile", "group", "gpus", "status", "since", "namespace", "container", "container_title", "priority", "kind", "need_bytes", "held_bytes", "busy", "requests", "reason", "before", "turn_at", "failures", "retry_at", "error", "stands_by_for", "wake_on_use", "lost", "crowded")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        FREE: _ClassVar[Seat.Status]
        STARTING: _ClassVar[Seat.Status]
        ACTIVE: _ClassVar[Seat.Status]
        SUSPENDING: _ClassVar[Seat.Status]
        SUSPENDED: _ClassVar[Seat.Status]
        PARKING: _ClassVar[Seat.Status]
        PARKED: _ClassVar[Seat.Status]
        WAKING: _ClassVar[Seat.Status]
        FAILED: _ClassVar[Seat.Status]
    FREE: Seat.Status
    STARTING: Seat.Status
    ACTIVE: Seat.Status
    SUSPENDING: Seat.Status
    SUSPENDED: Seat.Status
    PARKING: Seat.Status
    PARKED: Seat.Status
    WAKING: Seat.Status
    FAILED: Seat.Status
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_TITLE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NEED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    TURN_AT_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    RETRY_AT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STANDS_BY_FOR_FIELD_NUMBER: _ClassVar[int]
    WAKE_ON_USE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    CROWDED_FIELD_NUMBER: _ClassVar[int]
    name: str
    profile: str
    group: str
    gpus: _containers.RepeatedScalarFieldContainer[int]
    status: Seat.Status
    since: _timestamp_pb2.Timestamp
    namespace: str
    container: str
    container_title: str
    priority: int
    kind: str
    need_bytes: int
    held_bytes: int
    busy: bool
    requests: _containers.RepeatedCompositeFieldContainer[SeatRequest]
    reason: str
    before: _containers.RepeatedScalarFieldContainer[str]
    turn_at: _timestamp_pb2.Timestamp
    failures: int
    retry_at: _timestamp_pb2.Timestamp
    error: str
    stands_by_for: str
    wake_on_use: bool
    lost: bool
    crowded: bool
    def __init__(self, name: _Optional[str] = ..., profile: _Optional[str] = ..., group: _Optional[str] = ..., gpus: _Optional[_Iterable[int]] = ..., status: _Optional[_Union[Seat.Status, str]] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., namespace: _Optional[str] = ..., container: _Optional[str] = ..., container_title: _Optional[str] = ..., priority: _Optional[int] = ..., kind: _Optional[str] = ..., need_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ..., busy: _Optional[bool] = ..., requests: _Optional[_Iterable[_Union[SeatRequest, _Mapping]]] = ..., reason: _Optional[str] = ..., before: _Optional[_Iterable[str]] = ..., turn_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., failures: _Optional[int] = ..., retry_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., error: _Optional[str] = ..., stands_by_for: _Optional[str] = ..., wake_on_use: _Optional[bool] = ..., lost: _Optional[bool] = ..., crowded: _Optional[bool] = ...) -> None: ...

class SeatRequest(_message.Message):
    __slots__ = ("cause", "at", "deadline")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    cause: str
    at: _timestamp_pb2.Timestamp
    deadline: _timestamp_pb2.Timestamp
    def __init__(self, cause: _Optional[str] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetScheduleRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Schedule(_message.Message):
    __slots__ = ("turns",)
    TURNS_FIELD_NUMBER: _ClassVar[int]
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    def __init__(self, turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("seat", "at", "reason", "before", "container_title")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_TITLE_FIELD_NUMBER: _ClassVar[int]
    seat: str
    at: _timestamp_pb2.Timestamp
    reason: str
    before: _containers.RepeatedScalarFieldContainer[str]
    container_title: str
    def __init__(self, seat: _Optional[str] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., reason: _Optional[str] = ..., before: _Optional[_Iterable[str]] = ..., container_title: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("revision", "instance", "kinds")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    instance: str
    kinds: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, revision: _Optional[int] = ..., instance: _Optional[str] = ..., kinds: _Optional[_Iterable[str]] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("revision", "time", "instance", "removed", "bookmark", "container", "gpu", "operation", "image", "tier", "event", "seat")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    BOOKMARK_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    SEAT_FIELD_NUMBER: _ClassVar[int]
    revision: int
    time: _timestamp_pb2.Timestamp
    instance: str
    removed: bool
    bookmark: Bookmark
    container: Container
    gpu: Gpu
    operation: Operation
    image: Image
    tier: Tier
    event: Event
    seat: Seat
    def __init__(self, revision: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., instance: _Optional[str] = ..., removed: _Optional[bool] = ..., bookmark: _Optional[_Union[Bookmark, str]] = ..., container: _Optional[_Union[Container, _Mapping]] = ..., gpu: _Optional[_Union[Gpu, _Mapping]] = ..., operation: _Optional[_Union[Operation, _Mapping]] = ..., image: _Optional[_Union[Image, _Mapping]] = ..., tier: _Optional[_Union[Tier, _Mapping]] = ..., event: _Optional[_Union[Event, _Mapping]] = ..., seat: _Optional[_Union[Seat, _Mapping]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("id", "time", "type", "level", "message", "container", "namespace", "operation", "image", "fields")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    id: int
    time: _timestamp_pb2.Timestamp
    type: str
    level: str
    message: str
    container: str
    namespace: str
    operation: str
    image: str
    fields: _containers.ScalarMap[str, str]
    def __init__(self, id: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., type: _Optional[str] = ..., level: _Optional[str] = ..., message: _Optional[str] = ..., container: _Optional[str] = ..., namespace: _Optional[str] = ..., operation: _Optional[str] = ..., image: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Options(_message.Message):
    __slots__ = ("idempotency_key", "deadline", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    idempotency_key: str
    deadline: _duration_pb2.Duration
    labels: _containers.ScalarMap[str, str]
    def __init__(self, idempotency_key: _Optional[str] = ..., deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("name", "namespace", "path", "exit", "tcp", "without_rootfs", "force", "options", "hold", "hold_timeout", "volumes", "max_freeze_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    TCP_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_ROOTFS_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    HOLD_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    VOLUMES_FIELD_NUMBER: _ClassVar[int]
    MAX_FREEZE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace: str
    path: str
    exit: bool
    tcp: str
    without_rootfs: bool
    force: bool
    options: Options
    hold: bool
    hold_timeout: _duration_pb2.Duration
    volumes: str
    max_freeze_seconds: float
    def __init__(self, name: _Optional[str] = ..., namespace: _Optional[str] = ..., path: _Optional[str] = ..., exit: _Optional[bool] = ..., tcp: _Optional[str] = ..., without_rootfs: _Optional[bool] = ..., force: _Optional[bool] = ..., options: _Optional[_Union[Options, _Mapping]] = ..., hold: _Optional[bool] = ..., hold_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., volumes: _Optional[str] = ..., max_freeze_seconds: _Optional[float] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("image", "name", "namespace", "options", "container_image", "runtime", "snapshotter", "log_path", "force", "from_store")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_IMAGE_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTTER_FIELD_NUMBER: _ClassVar[int]
    LOG_PATH_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    FROM_STORE_FIELD_NUMBER: _ClassVar[int]
    image: str
    name: str
    namespace: str
    options: Options
    container_image: str
    runtime: str
    snapshotter: str
    log_path: str
    force: bool
    from_store: bool
    def __init__(self, image: _Optional[str] = ..., name: _Optional[str] = ..., namespace: _Optional[str] = ..., options: _Optional[_Union[Options, _Mapping]] = ..., container_image: _Optional[str] = ..., runtime: _Optional[str] = ..., snapshotter: _Optional[str] = ..., log_path: _Optional[str] = ..., force: _Optional[bool] = ..., from_store: _Optional[bool] = ...) -> None: ...

class SuspendRequest(_message.Message):
    __slots__ = ("name", "namespace", "lock_timeout", "options")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LOCK_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace: str
    lock_timeout: _duration_pb2.Duration
    options: Options
    def __init__(self, name: _Optional[str] = ..., namespace: _Optional[str] = ..., lock_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., options: _Optional[_Union[Options, _Mapping]] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("name", "namespace", "room_timeout", "options", "restore_timeout")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ROOM_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    RESTORE_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace: str
    room_timeout: _duration_pb2.Duration
    options: Options
    restore_timeout: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., namespace: _Optional[str] = ..., room_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., options: _Optional[_Union[Options, _Mapping]] = ..., restore_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SwapRequest(_message.Message):
    __slots__ = ("leaving", "coming", "namespace", "options", "room_timeout")
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    COMING_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    ROOM_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    leaving: str
    coming: str
    namespace: str
    options: Options
    room_timeout: _duration_pb2.Duration
    def __init__(self, leaving: _Optional[str] = ..., coming: _Optional[str] = ..., namespace: _Optional[str] = ..., options: _Optional[_Union[Options, _Mapping]] = ..., room_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("name", "namespace", "room_timeout", "options")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ROOM_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace: str
    room_timeout: _duration_pb2.Duration
    options: Options
    def __init__(self, name: _Optional[str] = ..., namespace: _Optional[str] = ..., room_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., options: _Optional[_Union[Options, _Mapping]] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("name", "namespace", "options", "unless_used", "gpu_only")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    UNLESS_USED_FIELD_NUMBER: _ClassVar[int]
    GPU_ONLY_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace: str
    options: Options
    unless_used: bool
    gpu_only: bool
    def __init__(self, name: _Optional[str] = ..., namespace: _Optional[str] = ..., options: _Optional[_Union[Options, _Mapping]] = ..., unless_used: _Optional[bool] = ..., gpu_only: _Optional[bool] = ...) -> None: ...

class ReportActivityRequest(_message.Message):
    __slots__ = ("container", "workload", "namespace", "in_flight", "lasts", "reporter")
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    LASTS_FIELD_NUMBER: _ClassVar[int]
    REPORTER_FIELD_NUMBER: _ClassVar[int]
    container: str
    workload: str
    namespace: str
    in_flight: int
    lasts: _duration_pb2.Duration
    reporter: str
    def __init__(self, container: _Optional[str] = ..., workload: _Optional[str] = ..., namespace: _Optional[str] = ..., in_flight: _Optional[int] = ..., lasts: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., reporter: _Optional[str] = ...) -> None: ...

class ReportActivityResponse(_message.Message):
    __slots__ = ("containers", "in_flight", "mark")
    CONTAINERS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    containers: int
    in_flight: int
    mark: int
    def __init__(self, containers: _Optional[int] = ..., in_flight: _Optional[int] = ..., mark: _Optional[int] = ...) -> None: ...

class ConcurrencyRequest(_message.Message):
    __slots__ = ("container", "namespace", "holder", "limit", "wanted", "held", "lasts", "seen")
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    LASTS_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    container: str
    namespace: str
    holder: str
    limit: int
    wanted: int
    held: int
    lasts: _duration_pb2.Duration
    seen: int
    def __init__(self, container: _Optional[str] = ..., namespace: _Optional[str] = ..., holder: _Optional[str] = ..., limit: _Optional[int] = ..., wanted: _Optional[int] = ..., held: _Optional[int] = ..., lasts: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., seen: _Optional[int] = ...) -> None: ...

class ConcurrencyShare(_message.Message):
    __slots__ = ("container", "namespace", "granted", "holders", "number")
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    container: str
    namespace: str
    granted: int
    holders: int
    number: int
    def __init__(self, container: _Optional[str] = ..., namespace: _Optional[str] = ..., granted: _Optional[int] = ..., holders: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class GetOperationRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class CancelOperationRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ListOperationsRequest(_message.Message):
    __slots__ = ("states", "container", "limit", "before")
    STATES_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedScalarFieldContainer[OperationState]
    container: str
    limit: int
    before: str
    def __init__(self, states: _Optional[_Iterable[_Union[OperationState, str]]] = ..., container: _Optional[str] = ..., limit: _Optional[int] = ..., before: _Optional[str] = ...) -> None: ...

class ListOperationsResponse(_message.Message):
    __slots__ = ("operations",)
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    operations: _containers.RepeatedCompositeFieldContainer[Operation]
    def __init__(self, operations: _Optional[_Iterable[_Union[Operation, _Mapping]]] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("id", "verb", "state", "container", "container_title", "namespace", "other_container", "image", "idempotency_key", "labels", "requester", "created", "started", "ended", "deadline", "steps", "progress", "result", "error", "notes", "revision", "other_container_title")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    VERB_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_TITLE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    OTHER_CONTAINER_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    OTHER_CONTAINER_TITLE_FIELD_NUMBER: _ClassVar[int]
    id: str
    verb: str
    state: OperationState
    container: str
    container_title: str
    namespace: str
    other_container: str
    image: str
    idempotency_key: str
    labels: _containers.ScalarMap[str, str]
    requester: str
    created: _timestamp_pb2.Timestamp
    started: _timestamp_pb2.Timestamp
    ended: _timestamp_pb2.Timestamp
    deadline: _timestamp_pb2.Timestamp
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    progress: Progress
    result: Result
    error: Error
    notes: _containers.RepeatedScalarFieldContainer[str]
    revision: int
    other_container_title: str
    def __init__(self, id: _Optional[str] = ..., verb: _Optional[str] = ..., state: _Optional[_Union[OperationState, str]] = ..., container: _Optional[str] = ..., container_title: _Optional[str] = ..., namespace: _Optional[str] = ..., other_container: _Optional[str] = ..., image: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., requester: _Optional[str] = ..., created: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., started: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ended: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., notes: _Optional[_Iterable[str]] = ..., revision: _Optional[int] = ..., other_container_title: _Optional[str] = ...) -> None: ...

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

class Progress(_message.Message):
    __slots__ = ("step", "done_bytes", "total_bytes", "seconds", "seconds_left", "waits_for")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    step: str
    done_bytes: int
    total_bytes: int
    seconds: float
    seconds_left: float
    waits_for: str
    def __init__(self, step: _Optional[str] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., seconds_left: _Optional[float] = ..., waits_for: _Optional[str] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("path", "image_id", "manifest_digest", "bytes", "frozen_ms", "vram_bytes", "arena_bytes", "arena_reasons", "pid", "source", "left_vram_bytes", "left_spared_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    IMAGE_ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FROZEN_MS_FIELD_NUMBER: _ClassVar[int]
    VRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_REASONS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LEFT_VRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_SPARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    image_id: str
    manifest_digest: str
    bytes: int
    frozen_ms: int
    vram_bytes: int
    arena_bytes: int
    arena_reasons: _containers.RepeatedScalarFieldContainer[str]
    pid: int
    source: str
    left_vram_bytes: int
    left_spared_bytes: int
    def __init__(self, path: _Optional[str] = ..., image_id: _Optional[str] = ..., manifest_digest: _Optional[str] = ..., bytes: _Optional[int] = ..., frozen_ms: _Optional[int] = ..., vram_bytes: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., arena_reasons: _Optional[_Iterable[str]] = ..., pid: _Optional[int] = ..., source: _Optional[str] = ..., left_vram_bytes: _Optional[int] = ..., left_spared_bytes: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("type", "message", "state", "advice")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    state: str
    advice: str
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., state: _Optional[str] = ..., advice: _Optional[str] = ...) -> None: ...

class ListImagesRequest(_message.Message):
    __slots__ = ("namespace", "pod", "workload", "source_image", "tier", "labels", "pinned", "limit", "page_token")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    SOURCE_IMAGE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    pod: str
    workload: str
    source_image: str
    tier: str
    labels: _containers.ScalarMap[str, str]
    pinned: bool
    limit: int
    page_token: str
    def __init__(self, namespace: _Optional[str] = ..., pod: _Optional[str] = ..., workload: _Optional[str] = ..., source_image: _Optional[str] = ..., tier: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., pinned: _Optional[bool] = ..., limit: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListImagesResponse(_message.Message):
    __slots__ = ("images", "next_page_token", "total")
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    images: _containers.RepeatedCompositeFieldContainer[Image]
    next_page_token: str
    total: int
    def __init__(self, images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., total: _Optional[int] = ...) -> None: ...

class GetImageRequest(_message.Message):
    __slots__ = ("image",)
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    image: str
    def __init__(self, image: _Optional[str] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("id", "name", "created", "source", "parent", "generation", "gpus", "bytes", "vram_bytes", "manifest_digest", "replicas", "labels", "pinned", "last_used", "last_restore_seconds", "states", "encrypted")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    VRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_FIELD_NUMBER: _ClassVar[int]
    LAST_RESTORE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    ENCRYPTED_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    created: _timestamp_pb2.Timestamp
    source: Source
    parent: str
    generation: int
    gpus: _containers.RepeatedCompositeFieldContainer[Gpu]
    bytes: int
    vram_bytes: int
    manifest_digest: str
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    labels: _containers.ScalarMap[str, str]
    pinned: bool
    last_used: _timestamp_pb2.Timestamp
    last_restore_seconds: float
    states: _containers.RepeatedScalarFieldContainer[str]
    encrypted: bool
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., created: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., source: _Optional[_Union[Source, _Mapping]] = ..., parent: _Optional[str] = ..., generation: _Optional[int] = ..., gpus: _Optional[_Iterable[_Union[Gpu, _Mapping]]] = ..., bytes: _Optional[int] = ..., vram_bytes: _Optional[int] = ..., manifest_digest: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., labels: _Optional[_Mapping[str, str]] = ..., pinned: _Optional[bool] = ..., last_used: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_restore_seconds: _Optional[float] = ..., states: _Optional[_Iterable[str]] = ..., encrypted: _Optional[bool] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("namespace", "pod", "container", "workload", "image", "image_digest", "node")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    pod: str
    container: str
    workload: str
    image: str
    image_digest: str
    node: str
    def __init__(self, namespace: _Optional[str] = ..., pod: _Optional[str] = ..., container: _Optional[str] = ..., workload: _Optional[str] = ..., image: _Optional[str] = ..., image_digest: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("tier", "node", "place", "state", "bytes", "verified", "name")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    tier: str
    node: str
    place: str
    state: ReplicaState
    bytes: int
    verified: _timestamp_pb2.Timestamp
    name: str
    def __init__(self, tier: _Optional[str] = ..., node: _Optional[str] = ..., place: _Optional[str] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., bytes: _Optional[int] = ..., verified: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., name: _Optional[str] = ...) -> None: ...

class PinImageRequest(_message.Message):
    __slots__ = ("image", "pinned")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    image: str
    pinned: bool
    def __init__(self, image: _Optional[str] = ..., pinned: _Optional[bool] = ...) -> None: ...

class LabelImageRequest(_message.Message):
    __slots__ = ("image", "labels", "removed")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    image: str
    labels: _containers.ScalarMap[str, str]
    removed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, image: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., removed: _Optional[_Iterable[str]] = ...) -> None: ...

class ParkRequest(_message.Message):
    __slots__ = ("name", "namespace", "options")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace: str
    options: Options
    def __init__(self, name: _Optional[str] = ..., namespace: _Optional[str] = ..., options: _Optional[_Union[Options, _Mapping]] = ...) -> None: ...

class VerifyImageRequest(_message.Message):
    __slots__ = ("image", "options")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    image: str
    options: Options
    def __init__(self, image: _Optional[str] = ..., options: _Optional[_Union[Options, _Mapping]] = ...) -> None: ...

class DeleteImageRequest(_message.Message):
    __slots__ = ("image", "force", "options")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    image: str
    force: bool
    options: Options
    def __init__(self, image: _Optional[str] = ..., force: _Optional[bool] = ..., options: _Optional[_Union[Options, _Mapping]] = ...) -> None: ...

class ImportImageRequest(_message.Message):
    __slots__ = ("path", "name", "namespace", "options")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    path: str
    name: str
    namespace: str
    options: Options
    def __init__(self, path: _Optional[str] = ..., name: _Optional[str] = ..., namespace: _Optional[str] = ..., options: _Optional[_Union[Options, _Mapping]] = ...) -> None: ...

class ExportImageRequest(_message.Message):
    __slots__ = ("image", "path", "options")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    image: str
    path: str
    options: Options
    def __init__(self, image: _Optional[str] = ..., path: _Optional[str] = ..., options: _Optional[_Union[Options, _Mapping]] = ...) -> None: ...

class CopyImageRequest(_message.Message):
    __slots__ = ("image", "tier", "priority", "demote", "options")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEMOTE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    image: str
    tier: str
    priority: str
    demote: bool
    options: Options
    def __init__(self, image: _Optional[str] = ..., tier: _Optional[str] = ..., priority: _Optional[str] = ..., demote: _Optional[bool] = ..., options: _Optional[_Union[Options, _Mapping]] = ...) -> None: ...

class EvictImageRequest(_message.Message):
    __slots__ = ("image", "tier", "options")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    image: str
    tier: str
    options: Options
    def __init__(self, image: _Optional[str] = ..., tier: _Optional[str] = ..., options: _Optional[_Union[Options, _Mapping]] = ...) -> None: ...

class GetSelfRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SelfCheckpointRequest(_message.Message):
    __slots__ = ("exit", "options")
    EXIT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    exit: bool
    options: Options
    def __init__(self, exit: _Optional[bool] = ..., options: _Optional[_Union[Options, _Mapping]] = ...) -> None: ...

class SuspendWhenIdleRequest(_message.Message):
    __slots__ = ("idle", "options")
    IDLE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    idle: _duration_pb2.Duration
    options: Options
    def __init__(self, idle: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., options: _Optional[_Union[Options, _Mapping]] = ...) -> None: ...
