# mypy: disable-error-code="type-arg"
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class TakeRequest(_message.Message):
    __slots__ = ("namespace", "container", "gpus")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    container: str
    gpus: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, namespace: _Optional[str] = ..., container: _Optional[str] = ..., gpus: _Optional[_Iterable[str]] = ...) -> None: ...

class TakeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
