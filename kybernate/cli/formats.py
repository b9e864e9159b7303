"""The option `-o` of commands that list: a table, a wider one, JSON or YAML, as `kubectl` and `crictl` have it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from kybernate.cli.declared import Option
from kybernate.cli.output import GAP, echo, printable, show_columns, show_json

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from google.protobuf.timestamp_pb2 import Timestamp

Item = TypeVar("Item")


class Format(StrEnum):
    """How a list is printed."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


Output = Annotated[Format, Option(("--output", "-o"), "table, wide, json or yaml.", metavar="FORMAT", default="")]
NONE = "-"


@dataclass(frozen=True)
class Table(Generic[Item]):
    """How entries of a list are printed: a table has the first `narrow` columns, a wide one has all."""

    header: Sequence[str]
    row: Callable[[Item], Sequence[object]]
    document: Callable[[Item], Any]  # for JSON and YAML
    narrow: int

    def show(self, format: Format, items: Sequence[Item]) -> None:
        """Print a list."""
        if format == Format.JSON:
            show_json([self.document(one) for one in items])
        elif format == Format.YAML:
            show_yaml([self.document(one) for one in items])
        else:
            columns = self._columns(format)
            show_columns(self.header[:columns], [self.row(one)[:columns] for one in items])

    def show_change(self, format: Format, item: Item) -> None:
        """Print one entry that has changed: a line of JSON for programs, its cells for people."""
        if format in (Format.JSON, Format.YAML):
            echo(json.dumps(self.document(item), ensure_ascii=False))
        else:
            echo(GAP.join(printable(str(cell)) for cell in self.row(item)[: self._columns(format)]))

    def _columns(self, format: Format) -> int:
        return len(self.header) if format == Format.WIDE else self.narrow


@contextmanager
def until_interrupted() -> Iterator[None]:
    """Enclose what runs until Ctrl-C, which is its usual end."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def moment(stamp: Timestamp) -> float:
    """Return a time of a message in seconds since 1970, 0 where it has none."""
    return stamp.ToMicroseconds() / 1e6


def show_yaml(document: object) -> None:
    """Print a document as YAML."""
    import yaml  # 15 ms that every other command is spared

    echo(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), end="")


def show_document(document: object, format: Format) -> bool:
    """Print a document in a format for programs, and return whether it is one."""
    if format == Format.JSON:
        show_json(document)
    elif format == Format.YAML:
        show_yaml(document)
    return format in (Format.JSON, Format.YAML)


def document_of(message: Message) -> dict[str, Any]:
    """Return a message for JSON, with the names of its fields as the .proto file has them."""
    from google.protobuf.json_format import MessageToDict  # 15 ms that a command without JSON is spared

    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
