"""Options that containerd sends along with Create, Checkpoint and `start`, in every form that its clients use.

Which form arrives depends on the runtime's name, the client and containerd's version, not on what the options say. So
all forms are accepted everywhere and become one form here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError, Message

from kybernate_shim.config import Config, ConfigInvalid
from kybernate_shim.errors import Invalid
from kybernate_shim.messages import bootstrap_pb2 as bootstrap
from kybernate_shim.messages import linux_runc_options_pb2 as linux_runc
from kybernate_shim.messages import runc_options_pb2 as runc
from kybernate_shim.messages import runtime_options_pb2 as generic
from kybernate_shim.messages.any import type_name


@dataclass(frozen=True)
class RuntimeOptions:
    """What the client wants of the OCI runtime. An empty value means that the client did not specify it.

    `root` comes without the containerd namespace. `config_path` and `config_body` (TOML) hold settings of Kybernate's
    own; see `effective_config`.
    """

    no_pivot_root: bool = False
    no_new_keyring: bool = False
    shim_cgroup: str = ""
    io_uid: int = 0
    io_gid: int = 0
    binary_name: str = ""
    root: str = ""
    systemd_cgroup: bool = False
    criu_image_path: str = ""
    criu_work_path: str = ""
    config_path: str = ""
    config_body: str = ""


@dataclass(frozen=True)
class CheckpointOptions:
    """What the client wants of one checkpoint. Paths are empty where the client left the choice to us."""

    exit: bool = False
    open_tcp: bool = False
    external_unix_sockets: bool = False
    terminal: bool = False
    file_locks: bool = False
    empty_namespaces: tuple[str, ...] = ()
    cgroups_mode: str = ""
    image_path: str = ""
    work_path: str = ""


# Keys of containerd's own options table. They end up in config_body where containerd does not know the runtime's name,
# with the same meaning as for a known one.
CREATE_FIELDS = (  # of the messages of runc's shims, whose names are ours
    "no_pivot_root", "no_new_keyring", "shim_cgroup", "io_uid", "io_gid", "criu_image_path", "criu_work_path",
)  # fmt: skip
TABLE_KEYS: Mapping[str, tuple[str, type]] = {
    "NoPivotRoot": ("no_pivot_root", bool),
    "NoNewKeyring": ("no_new_keyring", bool),
    "ShimCgroup": ("shim_cgroup", str),
    "IoUid": ("io_uid", int),
    "IoGid": ("io_gid", int),
    "BinaryName": ("binary_name", str),
    "Root": ("root", str),
    "SystemdCgroup": ("systemd_cgroup", bool),
    "CriuImagePath": ("criu_image_path", str),
    "CriuWorkPath": ("criu_work_path", str),
}
IGNORED_TABLE_KEYS = ("TypeUrl", "ConfigPath", "ConfigBody", "CriuPath", "TaskApiAddress", "TaskApiVersion")


def decode_options(options: Any | None) -> RuntimeOptions:
    """Read the options of Create or `start`. None, and an Any without a type, are no options.

    Options of a checkpoint are accepted and have no effect here. Raises Invalid.
    """
    return _decode(options, _OPTIONS, RuntimeOptions())


def decode_checkpoint_options(options: Any | None) -> CheckpointOptions:
    """Read the options of Checkpoint. None, and an Any without a type, mean the defaults.

    Options of a container are accepted and have no effect here. Raises Invalid.
    """
    return _decode(options, _CHECKPOINT_OPTIONS, CheckpointOptions())


def decode_start_input(data: bytes) -> Any | None:
    """Return the options from the standard input of `start`: an Any, or from containerd 2.3 on BootstrapParams.

    Both begin with two fields that decode as either; an Any has no others, and a BootstrapParams always has more.
    """
    params = _parse(bootstrap.BootstrapParams, data)
    if params is not None and (params.containerd_version or params.containerd_grpc_address or params.extensions):
        values = (extension.value for extension in params.extensions)
        return next((value for value in values if type_name(value) in _OPTIONS), None)
    return _parse(Any, data) if data else None


def effective_config(config: Config, options: RuntimeOptions) -> Config:
    """Return the node's configuration with the changes of the runtime options: the file they name, then their body.

    Raises ConfigInvalid; also when the file that they name cannot be read.
    """
    if options.config_path:
        config = config.merged(_read(options.config_path), source=options.config_path)
    if options.config_body:
        table = _toml(options.config_body)
        own = {key: value for key, value in table.items() if key not in TABLE_KEYS and key not in IGNORED_TABLE_KEYS}
        config = config.merged(own, source="runtime options")
    return config


T = TypeVar("T")
M = TypeVar("M", bound=Message)


def _decode(options: Any | None, decoders: Mapping[str, Callable[[bytes], T]], default: T) -> T:
    name = type_name(options) if options is not None else ""
    if options is None or not name:
        return default
    if name not in (known := {**_OPTIONS, **_CHECKPOINT_OPTIONS}):
        raise Invalid(f"options of type {options.type_url}; supported are {', '.join(known)}")
    try:
        return decoders[name](options.value) if name in decoders else default
    except DecodeError as error:
        raise Invalid(f"options of type {options.type_url} cannot be decoded: {error}") from error


def _parse(kind: type[M], data: bytes) -> M | None:
    try:
        return kind.FromString(data)
    except DecodeError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(path, [f"named by the runtime options, but cannot be read: {error}"]) from error


def _toml(body: str) -> dict[str, object]:
    import tomllib  # here, because the first container of a node waits for every import

    try:
        return tomllib.loads(body)
    except tomllib.TOMLDecodeError as error:
        raise Invalid(f"config_body of the runtime options is not TOML: {error}") from error


def _from_runc(data: bytes) -> RuntimeOptions:
    return _same_fields(runc.Options.FromString(data), (*CREATE_FIELDS, "binary_name", "root", "systemd_cgroup"))


def _from_linux_create(data: bytes) -> RuntimeOptions:
    return _same_fields(linux_runc.CreateOptions.FromString(data), CREATE_FIELDS)


def _same_fields(message: Message, names: Iterable[str]) -> RuntimeOptions:
    return RuntimeOptions(**{name: getattr(message, name) for name in names})


def _from_linux_runc(data: bytes) -> RuntimeOptions:
    message = linux_runc.RuncOptions.FromString(data)
    return RuntimeOptions(binary_name=message.runtime, root=message.runtime_root, systemd_cgroup=message.systemd_cgroup)


def _from_generic(data: bytes) -> RuntimeOptions:
    message = generic.Options.FromString(data)
    try:
        body = message.config_body.decode()
    except UnicodeDecodeError as error:
        raise Invalid(f"config_body of the runtime options is not UTF-8: {error}") from error
    options = RuntimeOptions(config_path=message.config_path, config_body=body)
    for key, value in _toml(body).items():
        if key in TABLE_KEYS:
            name, kind = TABLE_KEYS[key]
            if type(value) is not kind:
                raise Invalid(f"{key} in the runtime options must be of type {kind.__name__}: {value!r}")
            options = replace(options, **{name: value})  # type: ignore[arg-type]  # TABLE_KEYS says the type
    return options


def _from_checkpoint(
    kind: type[runc.CheckpointOptions | linux_runc.CheckpointOptions],
) -> Callable[[bytes], CheckpointOptions]:
    """Return a decoder of either message. They have the same fields, two of them with exchanged numbers."""

    def decode(data: bytes) -> CheckpointOptions:
        message = kind.FromString(data)
        return CheckpointOptions(
            exit=message.exit,
            open_tcp=message.open_tcp,
            external_unix_sockets=message.external_unix_sockets,
            terminal=message.terminal,
            file_locks=message.file_locks,
            empty_namespaces=tuple(message.empty_namespaces),
            cgroups_mode=message.cgroups_mode,
            image_path=message.image_path,
            work_path=message.work_path,
        )

    return decode


_OPTIONS: Mapping[str, Callable[[bytes], RuntimeOptions]] = {
    "containerd.runc.v1.Options": _from_runc,
    "runtimeoptions.v1.Options": _from_generic,
    "containerd.linux.runc.CreateOptions": _from_linux_create,
    "containerd.linux.runc.RuncOptions": _from_linux_runc,
}
_CHECKPOINT_OPTIONS: Mapping[str, Callable[[bytes], CheckpointOptions]] = {
    "containerd.runc.v1.CheckpointOptions": _from_checkpoint(runc.CheckpointOptions),
    "containerd.linux.runc.CheckpointOptions": _from_checkpoint(linux_runc.CheckpointOptions),
}
