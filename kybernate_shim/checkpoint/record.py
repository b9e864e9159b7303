"""Dataclasses to JSON and back, strictly: what does not fit is refused under the name of its field.

Only what a manifest needs: str, int, float, bool, tuples of one type, nested dataclasses, closed sets of words.
"""

from __future__ import annotations

import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


class FieldInvalid(Exception):
    """A value that does not fit. `field` is its place, for example `processes[2].pid`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field or 'document'}: {problem}")
        self.field = field


def to_json(value: Any) -> Any:
    """Return `value` as what json.dumps takes: dataclasses become objects, tuples become arrays."""
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return value


def from_json(kind: type[T], value: object, place: str = "") -> T:
    """Return the parsed JSON `value` as an instance of the dataclass `kind`.

    A field may be left out where it has a default; a field that nobody knows is refused, because ignoring it could mean
    to restore something else than what was dumped. Raises FieldInvalid.
    """
    if not isinstance(value, dict):
        raise FieldInvalid(place, f"expected an object, found {_shown(value)}")
    prefix = f"{place}." if place else ""
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # T is a dataclass, unsayable
    for name in value.keys() - known.keys():
        raise FieldInvalid(f"{prefix}{name}", "unknown field; was the image made by a newer release?")
    arguments = {}
    for name, field in known.items():
        if name in value:
            arguments[name] = _value(hints[name], value[name], f"{prefix}{name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise FieldInvalid(f"{prefix}{name}", "missing")
    return kind(**arguments)


def _value(kind: Any, value: object, place: str) -> Any:
    if is_dataclass(kind):
        return from_json(kind, value, place)  # type: ignore[arg-type]  # a class, since it is a type hint
    if get_origin(kind) is tuple:
        return _items(get_args(kind)[0], value, place)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise FieldInvalid(place, f"expected one of {', '.join(map(str, get_args(kind)))}, found {_shown(value)}")
        return value
    return _plain(kind, value, place)


def _items(kind: Any, value: object, place: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise FieldInvalid(place, f"expected an array, found {_shown(value)}")
    return tuple(_value(kind, item, f"{place}[{index}]") for index, item in enumerate(value))


def _plain(kind: type | types.UnionType, value: object, place: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        words = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
        raise FieldInvalid(place, f"expected {words.get(kind, kind)}, found {_shown(value)}")  # type: ignore[arg-type]
    if kind is int and isinstance(value, int) and value < 0:
        raise FieldInvalid(place, f"expected 0 or more, found {value}")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
