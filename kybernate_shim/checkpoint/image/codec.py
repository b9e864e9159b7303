"""Dataclasses to JSON and back, strictly: what does not fit is refused under the name of its field.

Only what a manifest needs: str, int, float, bool, tuples of one type, nested dataclasses, what may be None, closed sets
of words. A document may come from anywhere, so its size, its texts, its numbers and its arrays have limits.
"""

from __future__ import annotations

import math
import types
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

from kybernate_shim import bounded_json

T = TypeVar("T")

LONGEST_TEXT: Final = 16 << 10  # bytes; a path has 4096, an option of a mount at most a page
MOST_ITEMS: Final = 1 << 16  # in an array, where its field names no other number
LARGEST: Final = (1 << 64) - 1


def field_invalid(field: str, problem: str) -> ValueError:
    """Return the error of a value that does not fit. `field` is its place, for example `processes[2].pid`."""
    return ValueError(f"{field or 'document'}: {problem}")


def parse(content: bytes, *, most: int = bounded_json.MOST_VALUES) -> Any:
    """Return the JSON value in `content`. Time and memory are bounded by the length of `content`.

    Raises ValueError for more than JSON, of which Python's parser accepts some: a key that is listed twice, NaN and
    Infinity; and for a document of too many values, too deep nesting or numbers of thousands of digits.
    """
    return bounded_json.parse(content, most_values=most, pairs=_object, constant=_refuse_constant)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return document


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def to_json(value: Any) -> Any:
    """Return `value` as what json.dumps takes: dataclasses become objects, tuples become arrays."""
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return value


def from_json(kind: type[T], value: object, place: str = "") -> T:
    """Return the parsed JSON `value` as an instance of the dataclass `kind`.

    A field may be left out where it has a default; an unknown field is refused, because ignoring it could mean
    to restore something else than what was dumped. Raises ValueError.
    """
    if not isinstance(value, dict):
        raise field_invalid(place, f"expected an object, found {_shown(value)}")
    prefix = f"{place}." if place else ""
    known = _fields(kind)  # type: ignore[arg-type]  # mypy finds no hash in a type variable
    for name in value.keys() - known.keys():
        shown = name if name.isidentifier() and len(name) < 60 else _shown(name)
        raise field_invalid(f"{prefix}{shown}", "unknown field; was the image made by a newer release?")
    arguments = {}
    for name, (field, hint) in known.items():
        if name in value:
            most = field.metadata.get("most", MOST_ITEMS)
            arguments[name] = _value(hint, value[name], f"{prefix}{name}", most)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise field_invalid(f"{prefix}{name}", "missing")
    return kind(**arguments)


@cache
def _fields(kind: type[Any]) -> dict[str, tuple[Field[Any], Any]]:
    """Return each field with its type; a document may have thousands of instances of one dataclass."""
    hints = get_type_hints(kind)
    return {field.name: (field, hints[field.name]) for field in fields(kind)}


def _value(kind: Any, value: object, place: str, most: int = MOST_ITEMS) -> Any:
    if is_dataclass(kind):
        return from_json(kind, value, place)  # type: ignore[arg-type]  # a class, since it is a type hint
    if isinstance(kind, types.UnionType):  # `X | None`
        return None if value is None else _value(get_args(kind)[0], value, place)
    if get_origin(kind) is tuple:
        return _items(get_args(kind)[0], value, place, most)
    if get_origin(kind) is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            raise field_invalid(place, f"expected one of {', '.join(map(str, get_args(kind)))}, found {_shown(value)}")
        return value
    return _plain(kind, value, place)


def _items(kind: Any, value: object, place: str, most: int) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise field_invalid(place, f"expected an array, found {_shown(value)}")
    if len(value) > most:
        raise field_invalid(place, f"{len(value)} items, at most {most} are accepted")
    return tuple(_value(kind, item, f"{place}[{index}]") for index, item in enumerate(value))


def _plain(kind: type, value: object, place: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST:
        return float(value)
    if type(value) is not kind:
        words = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
        raise field_invalid(place, f"expected {words.get(kind, kind)}, found {_shown(value)}")
    if isinstance(value, str):
        _check_text(value, place)
    elif kind is int and isinstance(value, int) and not 0 <= value <= LARGEST:
        wanted = "0 or more" if value < 0 else f"at most {LARGEST}"
        raise field_invalid(place, f"expected {wanted}, found {_shown(value)}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise field_invalid(place, f"expected a finite number, found {_shown(value)}")
    return value


def _check_text(value: str, place: str) -> None:
    """Refuse what is too long, and half of a surrogate pair, which no call of the system accepts."""
    if len(value) > LONGEST_TEXT:
        raise field_invalid(place, f"{len(value)} characters, at most {LONGEST_TEXT} are accepted")
    if not value.isascii():
        try:
            value.encode(errors="surrogateescape")
        except UnicodeEncodeError as error:
            raise field_invalid(place, f"a text that is not Unicode ({error.reason})") from error


def _shown(value: object) -> str:
    if isinstance(value, list | dict):
        return "an array" if isinstance(value, list) else "an object"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = ascii(value[:60]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
