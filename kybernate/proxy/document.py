"""A YAML document read field by field, so that all mistakes are reported, each with its line and column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import yaml

from kybernate.node.failure import Invalid

Read = TypeVar("Read")
REQUIRED: Final = object()
SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
BYTES: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "B": 1}
MOST_NESTED: Final = 32
ADVICE: Final = "correct the file; `kybernate proxy --check` reads it without starting anything"


def unusable(message: str, *, state: str = "", advice: str = ADVICE) -> Invalid:
    """Return that the proxy's settings cannot be used. Each line of a document's begins with FILE:LINE:COLUMN."""
    return Invalid(message, state=state, advice=advice)


class Item:
    """A value of the document, with the path of keys that lead to it."""

    def __init__(self, node: yaml.Node, path: str, problems: list[tuple[int, int, str]]) -> None:
        self.node, self.path, self._problems = node, path, problems

    @property
    def value(self) -> Any:
        """Return it as Python has it."""
        return yaml.constructor.SafeConstructor().construct_object(self.node, deep=True)

    def entries(self) -> dict[str, Item]:
        """Return the values of a mapping by their keys. Raises ValueError for anything else."""
        if not isinstance(self.node, yaml.MappingNode):
            raise ValueError("must be a mapping of keys to values")
        found: dict[str, Item] = {}
        for key, value in self.node.value:
            name = str(key.value)
            path = f"{self.path}.{name}" if self.path else name
            if name in found:
                self.problem(f"{path} is given twice", key)
            found[name] = Item(value, path, self._problems)
        return found

    def items(self) -> list[Item]:
        """Return the values of a list. Raises ValueError for anything else."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise ValueError("must be a list")
        return [Item(one, f"{self.path}[{index}]", self._problems) for index, one in enumerate(self.node.value)]

    def replaced(self, node: yaml.Node) -> Item:
        """Return an item at the same place whose value is another node's."""
        return Item(node, self.path, self._problems)

    def problem(self, text: str, node: yaml.Node | None = None) -> None:
        mark = (node or self.node).start_mark
        self._problems.append((mark.line + 1, mark.column + 1, text))


class Section:
    """A mapping whose keys are known: each is taken once, and what is left over is a mistake."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self._fields: dict[str, Item] = {}
        self._taken: list[str] = []
        try:
            self._fields = item.entries()
        except ValueError as error:
            item.problem(f"{item.path or 'the document'} {error}")
        self._given = frozenset(self._fields)

    def has(self, *keys: str) -> bool:
        """Return whether the document has one of these keys, taken or not."""
        return any(key in self._given for key in keys)

    def take(self, key: str, read: Callable[[Item], Read], default: Any = REQUIRED) -> Read:
        """Return a field as `read` makes it of its value, or the default. What is wrong becomes a problem."""
        self._taken.append(key)
        item = self._fields.pop(key, None)
        if item is None:
            if default is REQUIRED:
                self.item.problem(f"{self.item.path or 'the document'} needs the key {key}")
            return None if default is REQUIRED else default  # type: ignore[return-value]
        try:
            return read(item)
        except ValueError as error:
            item.problem(f"{item.path} {error}")
            return None if default is REQUIRED else default  # type: ignore[return-value]

    def end(self) -> None:
        """Report the keys that were not taken."""
        for name, item in self._fields.items():
            near = get_close_matches(name, self._taken, 1)
            meant = f": did you mean {near[0]}?" if near else ""
            item.problem(f"{item.path} is unknown; the keys here are {', '.join(sorted(self._taken))}{meant}")


def read_document(text: str, name: str, read: Callable[[Item], Read]) -> Read:
    """Return what `read` makes of a YAML document. Raises Invalid with all that is wrong in it.

    `name` is the file's, for messages, each of which begins with FILE:LINE:COLUMN.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        lines = text.split("\n")
        line = lines[mark.line] if mark and mark.line < len(lines) else ""
        quotes = "; a value with ${…} needs quotes inside braces" if "${" in line else ""
        raise unusable(f"{name}{place}: {error.problem}{quotes}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise unusable(f"{name}: is no YAML: {error}") from error
    problems: list[tuple[int, int, str]] = []
    found = read(Item(node or yaml.MappingNode("tag:yaml.org,2002:map", [], *(_start(name),) * 2), "", problems))
    if problems:
        raise unusable("\n".join(f"{name}:{line}:{column}: {text}" for line, column, text in sorted({*problems})))
    return found


def read_text(path: Path) -> str:
    """Return the text of a file of the operator's. Raises Invalid."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unusable(f"{path} cannot be read: {error}") from error


def _start(name: str) -> yaml.Mark:
    return yaml.Mark(name, 0, 0, 0, "", 0)


# ---- forms of values


def text(item: Item) -> str:
    value = item.value
    if not isinstance(value, str) or not value:
        raise ValueError("must be a text")
    return value


def count(item: Item) -> int:
    value = item.value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("must be a whole number, 0 or more")
    return value


def yes_or_no(item: Item) -> bool:
    value = item.value
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def seconds(item: Item) -> float:
    return _with_unit(item.value, SECONDS, "a time such as 1.5, 500ms, 30s, 5m or 2h")


def size(item: Item) -> int:
    return int(_with_unit(item.value, BYTES, "a size such as 4096, 64KiB, 16MiB or 2GiB"))


def _with_unit(value: object, units: Mapping[str, float], words: str) -> float:
    if isinstance(value, str):
        unit = next((one for one in units if value.endswith(one)), "")
        number, factor = value.removesuffix(unit).strip(), units.get(unit, 1)
        if number.replace(".", "", 1).isdecimal():
            return float(number) * factor
    elif isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    raise ValueError(f"must be {words}")


def texts(item: Item) -> tuple[str, ...]:
    return (text(item),) if isinstance(item.value, str) else tuple(text(one) for one in item.items())


def text_map(item: Item) -> dict[str, str]:
    return {name: text(one) for name, one in item.entries().items()}


def among(*words: str) -> Callable[[Item], str]:
    def read(item: Item) -> str:
        if item.value not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return str(item.value)

    return read


def absolute_path(item: Item) -> Path:
    path = Path(text(item))
    if not path.is_absolute():
        raise ValueError("must be an absolute path")
    return path


def address(item: Item) -> str:
    """Read HOST:PORT, or unix: with the absolute path of a socket."""
    return checked_address(text(item))


def checked_address(value: str) -> str:
    """Return an address as `address` reads it. Raises ValueError."""
    if value.startswith("unix:/"):
        return value
    _host_and_port(value)
    return value


def listen(item: Item) -> tuple[str, int]:
    """Read HOST:PORT; an IPv6 address stands in brackets."""
    return _host_and_port(str(item.value))


def _host_and_port(value: str) -> tuple[str, int]:
    host, _, port = value.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or int(port) >= 1 << 16:
        raise ValueError("must be HOST:PORT, such as 0.0.0.0:8080 or [::]:8080")
    return host.strip("[]"), int(port)


def url(*schemes: str) -> Callable[[Item], str]:
    """Read an address of these schemes, without query, name and password."""

    def read(item: Item) -> str:
        value = text(item)
        parts = urlsplit(value)
        usable = parts.scheme in schemes and parts.hostname and not parts.query and "@" not in parts.netloc
        if not usable or parts.port == 0 or any(one.isspace() for one in value):  # .port raises ValueError by itself
            raise ValueError(f"must be an address such as {schemes[0]}://127.0.0.1:8000")
        return value.rstrip("/")

    return read


def json_value(item: Item) -> Any:
    """Return what JSON can have as well."""
    value = item.value
    _require_json(value, MOST_NESTED)
    return value


def _require_json(value: object, left: int) -> None:
    if left == 0:
        raise ValueError("is nested too deeply")
    inner: Iterable[object] = ()
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("has a key that is no text")
        inner = value.values()
    elif isinstance(value, list):
        inner = value
    elif not isinstance(value, str | int | float | bool | None):
        raise ValueError("is no value that JSON has")
    for one in inner:
        _require_json(one, left - 1)
