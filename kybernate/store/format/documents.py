"""JSON that any client with write access may have put into a store, without a digest that says that it is ours."""

from __future__ import annotations

from typing import Any, Final

from kybernate.store.errors import StoreInvalid
from kybernate_shim import bounded_json

MOST_NESTED: Final = 8  # a recipe has four


def parse(name: str, content: bytes, *, most_values: int = bounded_json.MOST_VALUES) -> dict[str, Any]:
    """Return the JSON object that is the content of an object named `name`. Raises StoreInvalid."""
    try:
        document = bounded_json.parse(content, most_values=most_values, most_nested=MOST_NESTED)
    except ValueError as error:
        raise StoreInvalid(f"{name} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise StoreInvalid(f"{name} cannot be read: it is not a JSON object")
    return document
