# mypy: disable-error-code="type-arg"
from google.protobuf import empty_pb2 as _empty_pb2
from kybernate_shim.messages import task_pb2 as _task_pb2
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor
