"""The option `-o` of every command that prints: a table, a wider one, JSON, YAML or names, as `kubectl` has it.

A document has one form whichever command prints it: times as RFC 3339 has them, sizes and counts as integers, states in
lower case. docs/output.md lists the documents, and docs/schemas/ describes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from kybernate.cli.declared import Option
from kybernate.cli.output import GAP, echo, json_of, moment, printable, show_columns, show_json
from kybernate.node.words import word_in

if TYPE_CHECKING:
    from google.protobuf.message import Message

Item = TypeVar("Item")


class Format(StrEnum):
    """How a command prints what it has found or done. NAME is for scripts: what other commands take as an argument."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"

    @property
    def is_document(self) -> bool:
        """Whether a program reads it."""
        return self in (Format.JSON, Format.YAML)


Output = Annotated[Format, Option(("--output", "-o"), "table, wide, json, yaml or name.", metavar="FORMAT", default="")]
NONE = "-"


@dataclass(frozen=True)
class Table(Generic[Item]):
    """How entries of a list are printed: a table has the first `narrow` columns, a wide one has all."""

    header: Sequence[str]
    row: Callable[[Item], Sequence[object]]
    document: Callable[[Item], Any]  # for JSON and YAML
    narrow: int
    name: Callable[[Item], str]

    def show(self, format: Format, items: Sequence[Item]) -> None:
        """Print a list."""
        if format.is_document:
            show_document([self.document(one) for one in items], format)
        elif format == Format.NAME:
            for one in items:
                echo(printable(self.name(one)))
        else:
            columns = self._columns(format)
            show_columns(self.header[:columns], [self.row(one)[:columns] for one in items])

    def show_change(self, format: Format, item: Item) -> None:
        """Print one entry that has changed: a line of JSON for programs, its cells for people."""
        if format.is_document:
            echo(json_of(self.document(item)))
        elif format == Format.NAME:
            echo(printable(self.name(item)))
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


def show_yaml(document: object) -> None:
    """Print a document as YAML."""
    import yaml  # it takes 15 ms to load, and no other command needs it

    echo(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), end="")


def show_document(document: object, format: Format, name: str = "") -> bool:
    """Print what a program or a script reads: a document, or the `name` of the thing. Return whether it was printed.

    Where it is False, the caller prints for people.
    """
    if format == Format.JSON:
        show_json(document)
    elif format == Format.YAML:
        show_yaml(document)
    elif format == Format.NAME:
        echo(printable(name))
    else:
        return False
    return True


def rfc3339(seconds: float) -> str | None:
    """Return a time, given in seconds since 1970, in UTC and with milliseconds; None for 0, which is not a time."""
    if not seconds:
        return None
    when = datetime.fromtimestamp(seconds, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def document_of(message: Message) -> dict[str, Any]:
    """Return a message as a document: its fields by their names in the .proto file, all of them."""
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: Message, field: Any) -> Any:
    found = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(sorted(found.items()))
    if field.is_repeated:
        return [_single(one, field) for one in found]
    if field.message_type is not None and not message.HasField(field.name):
        return None
    return _single(found, field)


def _single(found: Any, field: Any) -> Any:
    if field.enum_type is not None:
        return word_in(field.enum_type, found)
    if field.message_type is None:
        return found
    if field.message_type.full_name == "google.protobuf.Timestamp":
        return rfc3339(moment(found))
    return document_of(found)
