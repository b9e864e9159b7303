# mypy: disable-error-code="type-arg"
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class RuncOptions(_message.Message):
    __slots__ = ("runtime", "runtime_root", "criu_path", "systemd_cgroup")
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_ROOT_FIELD_NUMBER: _ClassVar[int]
    CRIU_PATH_FIELD_NUMBER: _ClassVar[int]
    SYSTEMD_CGROUP_FIELD_NUMBER: _ClassVar[int]
    runtime: str
    runtime_root: str
    criu_path: str
    systemd_cgroup: bool
    def __init__(self, runtime: _Optional[str] = ..., runtime_root: _Optional[str] = ..., criu_path: _Optional[str] = ..., systemd_cgroup: _Optional[bool] = ...) -> None: ...

class CreateOptions(_message.Message):
    __slots__ = ("no_pivot_root", "open_tcp", "external_unix_sockets", "terminal", "file_locks", "empty_namespaces", "cgroups_mode", "no_new_keyring", "shim_cgroup", "io_uid", "io_gid", "criu_work_path", "criu_image_path")
    NO_PIVOT_ROOT_FIELD_NUMBER: _ClassVar[int]
    OPEN_TCP_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_UNIX_SOCKETS_FIELD_NUMBER: _ClassVar[int]
    TERMINAL_FIELD_NUMBER: _ClassVar[int]
    FILE_LOCKS_FIELD_NUMBER: _ClassVar[int]
    EMPTY_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    CGROUPS_MODE_FIELD_NUMBER: _ClassVar[int]
    NO_NEW_KEYRING_FIELD_NUMBER: _ClassVar[int]
    SHIM_CGROUP_FIELD_NUMBER: _ClassVar[int]
    IO_UID_FIELD_NUMBER: _ClassVar[int]
    IO_GID_FIELD_NUMBER: _ClassVar[int]
    CRIU_WORK_PATH_FIELD_NUMBER: _ClassVar[int]
    CRIU_IMAGE_PATH_FIELD_NUMBER: _ClassVar[int]
    no_pivot_root: bool
    open_tcp: bool
    external_unix_sockets: bool
    terminal: bool
    file_locks: bool
    empty_namespaces: _containers.RepeatedScalarFieldContainer[str]
    cgroups_mode: str
    no_new_keyring: bool
    shim_cgroup: str
    io_uid: int
    io_gid: int
    criu_work_path: str
    criu_image_path: str
    def __init__(self, no_pivot_root: _Optional[bool] = ..., open_tcp: _Optional[bool] = ..., external_unix_sockets: _Optional[bool] = ..., terminal: _Optional[bool] = ..., file_locks: _Optional[bool] = ..., empty_namespaces: _Optional[_Iterable[str]] = ..., cgroups_mode: _Optional[str] = ..., no_new_keyring: _Optional[bool] = ..., shim_cgroup: _Optional[str] = ..., io_uid: _Optional[int] = ..., io_gid: _Optional[int] = ..., criu_work_path: _Optional[str] = ..., criu_image_path: _Optional[str] = ...) -> None: ...

class CheckpointOptions(_message.Message):
    __slots__ = ("exit", "open_tcp", "external_unix_sockets", "terminal", "file_locks", "empty_namespaces", "cgroups_mode", "work_path", "image_path")
    EXIT_FIELD_NUMBER: _ClassVar[int]
    OPEN_TCP_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_UNIX_SOCKETS_FIELD_NUMBER: _ClassVar[int]
    TERMINAL_FIELD_NUMBER: _ClassVar[int]
    FILE_LOCKS_FIELD_NUMBER: _ClassVar[int]
    EMPTY_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    CGROUPS_MODE_FIELD_NUMBER: _ClassVar[int]
    WORK_PATH_FIELD_NUMBER: _ClassVar[int]
    IMAGE_PATH_FIELD_NUMBER: _ClassVar[int]
    exit: bool
    open_tcp: bool
    external_unix_sockets: bool
    terminal: bool
    file_locks: bool
    empty_namespaces: _containers.RepeatedScalarFieldContainer[str]
    cgroups_mode: str
    work_path: str
    image_path: str
    def __init__(self, exit: _Optional[bool] = ..., open_tcp: _Optional[bool] = ..., external_unix_sockets: _Optional[bool] = ..., terminal: _Optional[bool] = ..., file_locks: _Optional[bool] = ..., empty_namespaces: _Optional[_Iterable[str]] = ..., cgroups_mode: _Optional[str] = ..., work_path: _Optional[str] = ..., image_path: _Optional[str] = ...) -> None: ...

class ProcessDetails(_message.Message):
    __slots__ = ("exec_id",)
    EXEC_ID_FIELD_NUMBER: _ClassVar[int]
    exec_id: str
    def __init__(self, exec_id: _Optional[str] = ...) -> None: ...
