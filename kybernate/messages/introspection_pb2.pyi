# mypy: disable-error-code="type-arg"
import datetime

from google.protobuf import any_pb2 as _any_pb2
from google.protobuf import empty_pb2 as _empty_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from kybernate_shim.messages import ttrpc_pb2 as _ttrpc_pb2
from kybernate_shim.messages import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Plugin(_message.Message):
    __slots__ = ("type", "id", "requires", "platforms", "exports", "capabilities", "init_err")
    class ExportsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUIRES_FIELD_NUMBER: _ClassVar[int]
    PLATFORMS_FIELD_NUMBER: _ClassVar[int]
    EXPORTS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    INIT_ERR_FIELD_NUMBER: _ClassVar[int]
    type: str
    id: str
    requires: _containers.RepeatedScalarFieldContainer[str]
    platforms: _containers.RepeatedCompositeFieldContainer[_types_pb2.Platform]
    exports: _containers.ScalarMap[str, str]
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    init_err: _ttrpc_pb2.Status
    def __init__(self, type: _Optional[str] = ..., id: _Optional[str] = ..., requires: _Optional[_Iterable[str]] = ..., platforms: _Optional[_Iterable[_Union[_types_pb2.Platform, _Mapping]]] = ..., exports: _Optional[_Mapping[str, str]] = ..., capabilities: _Optional[_Iterable[str]] = ..., init_err: _Optional[_Union[_ttrpc_pb2.Status, _Mapping]] = ...) -> None: ...

class PluginsRequest(_message.Message):
    __slots__ = ("filters",)
    FILTERS_FIELD_NUMBER: _ClassVar[int]
    filters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, filters: _Optional[_Iterable[str]] = ...) -> None: ...

class PluginsResponse(_message.Message):
    __slots__ = ("plugins",)
    PLUGINS_FIELD_NUMBER: _ClassVar[int]
    plugins: _containers.RepeatedCompositeFieldContainer[Plugin]
    def __init__(self, plugins: _Optional[_Iterable[_Union[Plugin, _Mapping]]] = ...) -> None: ...

class ServerResponse(_message.Message):
    __slots__ = ("uuid", "pid", "pidns", "deprecations")
    UUID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PIDNS_FIELD_NUMBER: _ClassVar[int]
    DEPRECATIONS_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    pid: int
    pidns: int
    deprecations: _containers.RepeatedCompositeFieldContainer[DeprecationWarning]
    def __init__(self, uuid: _Optional[str] = ..., pid: _Optional[int] = ..., pidns: _Optional[int] = ..., deprecations: _Optional[_Iterable[_Union[DeprecationWarning, _Mapping]]] = ...) -> None: ...

class DeprecationWarning(_message.Message):
    __slots__ = ("id", "message", "last_occurrence")
    ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LAST_OCCURRENCE_FIELD_NUMBER: _ClassVar[int]
    id: str
    message: str
    last_occurrence: _timestamp_pb2.Timestamp
    def __init__(self, id: _Optional[str] = ..., message: _Optional[str] = ..., last_occurrence: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class PluginInfoRequest(_message.Message):
    __slots__ = ("type", "id", "options")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    type: str
    id: str
    options: _any_pb2.Any
    def __init__(self, type: _Optional[str] = ..., id: _Optional[str] = ..., options: _Optional[_Union[_any_pb2.Any, _Mapping]] = ...) -> None: ...

class PluginInfoResponse(_message.Message):
    __slots__ = ("plugin", "extra")
    PLUGIN_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    plugin: Plugin
    extra: _any_pb2.Any
    def __init__(self, plugin: _Optional[_Union[Plugin, _Mapping]] = ..., extra: _Optional[_Union[_any_pb2.Any, _Mapping]] = ...) -> None: ...
