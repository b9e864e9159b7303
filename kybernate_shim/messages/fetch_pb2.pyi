# mypy: disable-error-code="type-arg"
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FetchRequest(_message.Message):
    __slots__ = ("namespace", "name", "container")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    name: str
    container: str
    def __init__(self, namespace: _Optional[str] = ..., name: _Optional[str] = ..., container: _Optional[str] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("namespace", "container")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    container: str
    def __init__(self, namespace: _Optional[str] = ..., container: _Optional[str] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("image", "digest")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    image: str
    digest: str
    def __init__(self, image: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class RelatedRequest(_message.Message):
    __slots__ = ("namespace", "name", "words")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    name: str
    words: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, namespace: _Optional[str] = ..., name: _Optional[str] = ..., words: _Optional[_Iterable[str]] = ...) -> None: ...

class RelatedResponse(_message.Message):
    __slots__ = ("images",)
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    images: _containers.RepeatedCompositeFieldContainer[RelatedImage]
    def __init__(self, images: _Optional[_Iterable[_Union[RelatedImage, _Mapping]]] = ...) -> None: ...

class RelatedImage(_message.Message):
    __slots__ = ("name", "id", "time", "container", "container_name", "pod", "pod_uid", "origin", "parent")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_NAME_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    id: str
    time: str
    container: str
    container_name: str
    pod: str
    pod_uid: str
    origin: str
    parent: str
    def __init__(self, name: _Optional[str] = ..., id: _Optional[str] = ..., time: _Optional[str] = ..., container: _Optional[str] = ..., container_name: _Optional[str] = ..., pod: _Optional[str] = ..., pod_uid: _Optional[str] = ..., origin: _Optional[str] = ..., parent: _Optional[str] = ...) -> None: ...
