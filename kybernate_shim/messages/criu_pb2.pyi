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
    __slots__ = ("architecture", "task", "kernel", "thread")
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
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    THREAD_FIELD_NUMBER: _ClassVar[int]
    architecture: Core.Architecture
    task: Task
    kernel: Kernel
    thread: Thread
    def __init__(self, architecture: _Optional[_Union[Core.Architecture, str]] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., kernel: _Optional[_Union[Kernel, _Mapping]] = ..., thread: _Optional[_Union[Thread, _Mapping]] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("state", "name", "limits", "login", "oom_score_adj")
    STATE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LOGIN_FIELD_NUMBER: _ClassVar[int]
    OOM_SCORE_ADJ_FIELD_NUMBER: _ClassVar[int]
    state: int
    name: str
    limits: Limits
    login: int
    oom_score_adj: int
    def __init__(self, state: _Optional[int] = ..., name: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., login: _Optional[int] = ..., oom_score_adj: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("limits",)
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    limits: _containers.RepeatedCompositeFieldContainer[Limit]
    def __init__(self, limits: _Optional[_Iterable[_Union[Limit, _Mapping]]] = ...) -> None: ...

class Limit(_message.Message):
    __slots__ = ("soft", "hard")
    SOFT_FIELD_NUMBER: _ClassVar[int]
    HARD_FIELD_NUMBER: _ClassVar[int]
    soft: int
    hard: int
    def __init__(self, soft: _Optional[int] = ..., hard: _Optional[int] = ...) -> None: ...

class Kernel(_message.Message):
    __slots__ = ("pid", "network", "ipc", "uts", "mount", "user", "cgroup", "time")
    PID_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    IPC_FIELD_NUMBER: _ClassVar[int]
    UTS_FIELD_NUMBER: _ClassVar[int]
    MOUNT_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    CGROUP_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    pid: int
    network: int
    ipc: int
    uts: int
    mount: int
    user: int
    cgroup: int
    time: int
    def __init__(self, pid: _Optional[int] = ..., network: _Optional[int] = ..., ipc: _Optional[int] = ..., uts: _Optional[int] = ..., mount: _Optional[int] = ..., user: _Optional[int] = ..., cgroup: _Optional[int] = ..., time: _Optional[int] = ...) -> None: ...

class Thread(_message.Message):
    __slots__ = ("nice", "policy", "creds", "seccomp_mode", "seccomp_filter", "cgroup_set")
    NICE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CREDS_FIELD_NUMBER: _ClassVar[int]
    SECCOMP_MODE_FIELD_NUMBER: _ClassVar[int]
    SECCOMP_FILTER_FIELD_NUMBER: _ClassVar[int]
    CGROUP_SET_FIELD_NUMBER: _ClassVar[int]
    nice: int
    policy: int
    creds: Creds
    seccomp_mode: int
    seccomp_filter: int
    cgroup_set: int
    def __init__(self, nice: _Optional[int] = ..., policy: _Optional[int] = ..., creds: _Optional[_Union[Creds, _Mapping]] = ..., seccomp_mode: _Optional[int] = ..., seccomp_filter: _Optional[int] = ..., cgroup_set: _Optional[int] = ...) -> None: ...

class Creds(_message.Message):
    __slots__ = ("uid", "gid", "euid", "egid", "suid", "sgid", "fsuid", "fsgid", "inheritable", "permitted", "effective", "bounding", "securebits", "groups", "lsm_profile", "no_new_privs", "ambient")
    UID_FIELD_NUMBER: _ClassVar[int]
    GID_FIELD_NUMBER: _ClassVar[int]
    EUID_FIELD_NUMBER: _ClassVar[int]
    EGID_FIELD_NUMBER: _ClassVar[int]
    SUID_FIELD_NUMBER: _ClassVar[int]
    SGID_FIELD_NUMBER: _ClassVar[int]
    FSUID_FIELD_NUMBER: _ClassVar[int]
    FSGID_FIELD_NUMBER: _ClassVar[int]
    INHERITABLE_FIELD_NUMBER: _ClassVar[int]
    PERMITTED_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_FIELD_NUMBER: _ClassVar[int]
    BOUNDING_FIELD_NUMBER: _ClassVar[int]
    SECUREBITS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    LSM_PROFILE_FIELD_NUMBER: _ClassVar[int]
    NO_NEW_PRIVS_FIELD_NUMBER: _ClassVar[int]
    AMBIENT_FIELD_NUMBER: _ClassVar[int]
    uid: int
    gid: int
    euid: int
    egid: int
    suid: int
    sgid: int
    fsuid: int
    fsgid: int
    inheritable: _containers.RepeatedScalarFieldContainer[int]
    permitted: _containers.RepeatedScalarFieldContainer[int]
    effective: _containers.RepeatedScalarFieldContainer[int]
    bounding: _containers.RepeatedScalarFieldContainer[int]
    securebits: int
    groups: _containers.RepeatedScalarFieldContainer[int]
    lsm_profile: str
    no_new_privs: int
    ambient: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, uid: _Optional[int] = ..., gid: _Optional[int] = ..., euid: _Optional[int] = ..., egid: _Optional[int] = ..., suid: _Optional[int] = ..., sgid: _Optional[int] = ..., fsuid: _Optional[int] = ..., fsgid: _Optional[int] = ..., inheritable: _Optional[_Iterable[int]] = ..., permitted: _Optional[_Iterable[int]] = ..., effective: _Optional[_Iterable[int]] = ..., bounding: _Optional[_Iterable[int]] = ..., securebits: _Optional[int] = ..., groups: _Optional[_Iterable[int]] = ..., lsm_profile: _Optional[str] = ..., no_new_privs: _Optional[int] = ..., ambient: _Optional[_Iterable[int]] = ...) -> None: ...

class Seccomp(_message.Message):
    __slots__ = ("filters",)
    FILTERS_FIELD_NUMBER: _ClassVar[int]
    filters: _containers.RepeatedCompositeFieldContainer[SeccompFilter]
    def __init__(self, filters: _Optional[_Iterable[_Union[SeccompFilter, _Mapping]]] = ...) -> None: ...

class SeccompFilter(_message.Message):
    __slots__ = ("program", "previous", "flags")
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    program: bytes
    previous: int
    flags: int
    def __init__(self, program: _Optional[bytes] = ..., previous: _Optional[int] = ..., flags: _Optional[int] = ...) -> None: ...

class UserNamespace(_message.Message):
    __slots__ = ("users", "groups")
    USERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    users: _containers.RepeatedCompositeFieldContainer[IdRange]
    groups: _containers.RepeatedCompositeFieldContainer[IdRange]
    def __init__(self, users: _Optional[_Iterable[_Union[IdRange, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[IdRange, _Mapping]]] = ...) -> None: ...

class IdRange(_message.Message):
    __slots__ = ("inside", "outside", "count")
    INSIDE_FIELD_NUMBER: _ClassVar[int]
    OUTSIDE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    inside: int
    outside: int
    count: int
    def __init__(self, inside: _Optional[int] = ..., outside: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Cgroups(_message.Message):
    __slots__ = ("sets", "controllers")
    SETS_FIELD_NUMBER: _ClassVar[int]
    CONTROLLERS_FIELD_NUMBER: _ClassVar[int]
    sets: _containers.RepeatedCompositeFieldContainer[CgroupSet]
    controllers: _containers.RepeatedCompositeFieldContainer[CgroupController]
    def __init__(self, sets: _Optional[_Iterable[_Union[CgroupSet, _Mapping]]] = ..., controllers: _Optional[_Iterable[_Union[CgroupController, _Mapping]]] = ...) -> None: ...

class CgroupSet(_message.Message):
    __slots__ = ("id", "members")
    ID_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    id: int
    members: _containers.RepeatedCompositeFieldContainer[CgroupMember]
    def __init__(self, id: _Optional[int] = ..., members: _Optional[_Iterable[_Union[CgroupMember, _Mapping]]] = ...) -> None: ...

class CgroupMember(_message.Message):
    __slots__ = ("controller", "path")
    CONTROLLER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    controller: str
    path: str
    def __init__(self, controller: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class CgroupController(_message.Message):
    __slots__ = ("names", "directories")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    DIRECTORIES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    directories: _containers.RepeatedCompositeFieldContainer[CgroupDirectory]
    def __init__(self, names: _Optional[_Iterable[str]] = ..., directories: _Optional[_Iterable[_Union[CgroupDirectory, _Mapping]]] = ...) -> None: ...

class CgroupDirectory(_message.Message):
    __slots__ = ("name", "children")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    name: str
    children: _containers.RepeatedCompositeFieldContainer[CgroupDirectory]
    def __init__(self, name: _Optional[str] = ..., children: _Optional[_Iterable[_Union[CgroupDirectory, _Mapping]]] = ...) -> None: ...

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
    __slots__ = ("type", "id", "regular", "internet", "inotify", "unix")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    REGULAR_FIELD_NUMBER: _ClassVar[int]
    INTERNET_FIELD_NUMBER: _ClassVar[int]
    INOTIFY_FIELD_NUMBER: _ClassVar[int]
    UNIX_FIELD_NUMBER: _ClassVar[int]
    type: int
    id: int
    regular: RegularFile
    internet: InternetSocket
    inotify: Inotify
    unix: UnixSocket
    def __init__(self, type: _Optional[int] = ..., id: _Optional[int] = ..., regular: _Optional[_Union[RegularFile, _Mapping]] = ..., internet: _Optional[_Union[InternetSocket, _Mapping]] = ..., inotify: _Optional[_Union[Inotify, _Mapping]] = ..., unix: _Optional[_Union[UnixSocket, _Mapping]] = ...) -> None: ...

class Inotify(_message.Message):
    __slots__ = ("watches",)
    class Watch(_message.Message):
        __slots__ = ("file",)
        FILE_FIELD_NUMBER: _ClassVar[int]
        file: FileHandle
        def __init__(self, file: _Optional[_Union[FileHandle, _Mapping]] = ...) -> None: ...
    WATCHES_FIELD_NUMBER: _ClassVar[int]
    watches: _containers.RepeatedCompositeFieldContainer[Inotify.Watch]
    def __init__(self, watches: _Optional[_Iterable[_Union[Inotify.Watch, _Mapping]]] = ...) -> None: ...

class FileHandle(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: bytes
    def __init__(self, path: _Optional[bytes] = ...) -> None: ...

class RegularFile(_message.Message):
    __slots__ = ("flags", "name", "mount", "size", "mode")
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MOUNT_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    flags: int
    name: bytes
    mount: int
    size: int
    mode: int
    def __init__(self, flags: _Optional[int] = ..., name: _Optional[bytes] = ..., mount: _Optional[int] = ..., size: _Optional[int] = ..., mode: _Optional[int] = ...) -> None: ...

class UnixSocket(_message.Message):
    __slots__ = ("inode", "type", "state", "name", "directory", "deleted", "mount")
    INODE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    MOUNT_FIELD_NUMBER: _ClassVar[int]
    inode: int
    type: int
    state: int
    name: bytes
    directory: bytes
    deleted: bool
    mount: int
    def __init__(self, inode: _Optional[int] = ..., type: _Optional[int] = ..., state: _Optional[int] = ..., name: _Optional[bytes] = ..., directory: _Optional[bytes] = ..., deleted: _Optional[bool] = ..., mount: _Optional[int] = ...) -> None: ...

class Descriptor(_message.Message):
    __slots__ = ("file", "type", "number")
    FILE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    file: int
    type: int
    number: int
    def __init__(self, file: _Optional[int] = ..., type: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Remap(_message.Message):
    __slots__ = ("file", "target", "kind")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LINKED: _ClassVar[Remap.Kind]
        GHOST: _ClassVar[Remap.Kind]
        PROCFS: _ClassVar[Remap.Kind]
    LINKED: Remap.Kind
    GHOST: Remap.Kind
    PROCFS: Remap.Kind
    FILE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    file: int
    target: int
    kind: Remap.Kind
    def __init__(self, file: _Optional[int] = ..., target: _Optional[int] = ..., kind: _Optional[_Union[Remap.Kind, str]] = ...) -> None: ...

class Ghost(_message.Message):
    __slots__ = ("mode",)
    MODE_FIELD_NUMBER: _ClassVar[int]
    mode: int
    def __init__(self, mode: _Optional[int] = ...) -> None: ...

class Directories(_message.Message):
    __slots__ = ("working", "root")
    WORKING_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    working: int
    root: int
    def __init__(self, working: _Optional[int] = ..., root: _Optional[int] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("program",)
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    program: int
    def __init__(self, program: _Optional[int] = ...) -> None: ...

class InternetSocket(_message.Message):
    __slots__ = ("type", "address", "peer")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    type: int
    address: _containers.RepeatedScalarFieldContainer[int]
    peer: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, type: _Optional[int] = ..., address: _Optional[_Iterable[int]] = ..., peer: _Optional[_Iterable[int]] = ...) -> None: ...

class Mount(_message.Message):
    __slots__ = ("type", "id", "device", "parent", "flags", "root", "mountpoint", "source", "options", "type_name", "superblock_flags", "key")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    MOUNTPOINT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TYPE_NAME_FIELD_NUMBER: _ClassVar[int]
    SUPERBLOCK_FLAGS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    type: int
    id: int
    device: int
    parent: int
    flags: int
    root: str
    mountpoint: str
    source: str
    options: str
    type_name: str
    superblock_flags: int
    key: str
    def __init__(self, type: _Optional[int] = ..., id: _Optional[int] = ..., device: _Optional[int] = ..., parent: _Optional[int] = ..., flags: _Optional[int] = ..., root: _Optional[str] = ..., mountpoint: _Optional[str] = ..., source: _Optional[str] = ..., options: _Optional[str] = ..., type_name: _Optional[str] = ..., superblock_flags: _Optional[int] = ..., key: _Optional[str] = ...) -> None: ...

class Inventory(_message.Message):
    __slots__ = ("version", "node", "node_cgroups", "tcp_close", "plugins")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NODE_CGROUPS_FIELD_NUMBER: _ClassVar[int]
    TCP_CLOSE_FIELD_NUMBER: _ClassVar[int]
    PLUGINS_FIELD_NUMBER: _ClassVar[int]
    version: int
    node: Kernel
    node_cgroups: int
    tcp_close: bool
    plugins: Plugins
    def __init__(self, version: _Optional[int] = ..., node: _Optional[_Union[Kernel, _Mapping]] = ..., node_cgroups: _Optional[int] = ..., tcp_close: _Optional[bool] = ..., plugins: _Optional[_Union[Plugins, _Mapping]] = ...) -> None: ...

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

class IpcDescription(_message.Message):
    __slots__ = ("key", "user", "group", "creator", "creator_group", "mode", "id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CREATOR_FIELD_NUMBER: _ClassVar[int]
    CREATOR_GROUP_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    key: int
    user: int
    group: int
    creator: int
    creator_group: int
    mode: int
    id: int
    def __init__(self, key: _Optional[int] = ..., user: _Optional[int] = ..., group: _Optional[int] = ..., creator: _Optional[int] = ..., creator_group: _Optional[int] = ..., mode: _Optional[int] = ..., id: _Optional[int] = ...) -> None: ...

class IpcSegment(_message.Message):
    __slots__ = ("description", "size", "in_pagemaps")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    IN_PAGEMAPS_FIELD_NUMBER: _ClassVar[int]
    description: IpcDescription
    size: int
    in_pagemaps: bool
    def __init__(self, description: _Optional[_Union[IpcDescription, _Mapping]] = ..., size: _Optional[int] = ..., in_pagemaps: _Optional[bool] = ...) -> None: ...

class IpcSemaphores(_message.Message):
    __slots__ = ("description", "count")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    description: IpcDescription
    count: int
    def __init__(self, description: _Optional[_Union[IpcDescription, _Mapping]] = ..., count: _Optional[int] = ...) -> None: ...

class IpcQueue(_message.Message):
    __slots__ = ("description", "count")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    description: IpcDescription
    count: int
    def __init__(self, description: _Optional[_Union[IpcDescription, _Mapping]] = ..., count: _Optional[int] = ...) -> None: ...

class IpcMessage(_message.Message):
    __slots__ = ("size",)
    SIZE_FIELD_NUMBER: _ClassVar[int]
    size: int
    def __init__(self, size: _Optional[int] = ...) -> None: ...
