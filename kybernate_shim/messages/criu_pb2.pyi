# mypy: disable-error-code="type-arg"
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Process(_message.Message):
    __slots__ = ("pid", "ppid", "threads")
    PID_FIELD_NUMBER: _ClassVar[int]
    PPID_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    pid: int
    ppid: int
    threads: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pid: _Optional[int] = ..., ppid: _Optional[int] = ..., threads: _Optional[_Iterable[int]] = ...) -> None: ...

class Core(_message.Message):
    __slots__ = ("architecture", "task")
    class Architecture(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[Core.Architecture]
        X86_64: _ClassVar[Core.Architecture]
        ARM: _ClassVar[Core.Architecture]
        AARCH64: _ClassVar[Core.Architecture]
        PPC64: _ClassVar[Core.Architecture]
        S390: _ClassVar[Core.Architecture]
        MIPS: _ClassVar[Core.Architecture]
        LOONGARCH64: _ClassVar[Core.Architecture]
        RISCV64: _ClassVar[Core.Architecture]
    UNKNOWN: Core.Architecture
    X86_64: Core.Architecture
    ARM: Core.Architecture
    AARCH64: Core.Architecture
    PPC64: Core.Architecture
    S390: Core.Architecture
    MIPS: Core.Architecture
    LOONGARCH64: Core.Architecture
    RISCV64: Core.Architecture
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    architecture: Core.Architecture
    task: Task
    def __init__(self, architecture: _Optional[_Union[Core.Architecture, str]] = ..., task: _Optional[_Union[Task, _Mapping]] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("state", "name")
    STATE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    state: int
    name: str
    def __init__(self, state: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class Pagemap(_message.Message):
    __slots__ = ("address", "short_pages", "pages")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SHORT_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    address: int
    short_pages: int
    pages: int
    def __init__(self, address: _Optional[int] = ..., short_pages: _Optional[int] = ..., pages: _Optional[int] = ...) -> None: ...

class PagemapHead(_message.Message):
    __slots__ = ("pages_id",)
    PAGES_ID_FIELD_NUMBER: _ClassVar[int]
    pages_id: int
    def __init__(self, pages_id: _Optional[int] = ...) -> None: ...

class File(_message.Message):
    __slots__ = ("type", "id")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    type: int
    id: int
    def __init__(self, type: _Optional[int] = ..., id: _Optional[int] = ...) -> None: ...

class Mount(_message.Message):
    __slots__ = ("type", "id", "device", "parent", "root", "mountpoint", "source", "options", "type_name", "key")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    MOUNTPOINT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TYPE_NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    type: int
    id: int
    device: int
    parent: int
    root: str
    mountpoint: str
    source: str
    options: str
    type_name: str
    key: str
    def __init__(self, type: _Optional[int] = ..., id: _Optional[int] = ..., device: _Optional[int] = ..., parent: _Optional[int] = ..., root: _Optional[str] = ..., mountpoint: _Optional[str] = ..., source: _Optional[str] = ..., options: _Optional[str] = ..., type_name: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class Inventory(_message.Message):
    __slots__ = ("version", "tcp_close", "plugins")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TCP_CLOSE_FIELD_NUMBER: _ClassVar[int]
    PLUGINS_FIELD_NUMBER: _ClassVar[int]
    version: int
    tcp_close: bool
    plugins: Plugins
    def __init__(self, version: _Optional[int] = ..., tcp_close: _Optional[bool] = ..., plugins: _Optional[_Union[Plugins, _Mapping]] = ...) -> None: ...

class Plugins(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class Stats(_message.Message):
    __slots__ = ("dump",)
    DUMP_FIELD_NUMBER: _ClassVar[int]
    dump: DumpStats
    def __init__(self, dump: _Optional[_Union[DumpStats, _Mapping]] = ...) -> None: ...

class DumpStats(_message.Message):
    __slots__ = ("freezing_us", "frozen_us", "memory_dump_us", "memory_write_us", "pages_scanned", "pages_written")
    FREEZING_US_FIELD_NUMBER: _ClassVar[int]
    FROZEN_US_FIELD_NUMBER: _ClassVar[int]
    MEMORY_DUMP_US_FIELD_NUMBER: _ClassVar[int]
    MEMORY_WRITE_US_FIELD_NUMBER: _ClassVar[int]
    PAGES_SCANNED_FIELD_NUMBER: _ClassVar[int]
    PAGES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    freezing_us: int
    frozen_us: int
    memory_dump_us: int
    memory_write_us: int
    pages_scanned: int
    pages_written: int
    def __init__(self, freezing_us: _Optional[int] = ..., frozen_us: _Optional[int] = ..., memory_dump_us: _Optional[int] = ..., memory_write_us: _Optional[int] = ..., pages_scanned: _Optional[int] = ..., pages_written: _Optional[int] = ...) -> None: ...
