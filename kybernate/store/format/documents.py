"""JSON that any client with write access may have put into a store, without a digest that says that it is ours."""

from __future__ import annotations

import json
from typing import Any

from kybernate.store.errors import StoreInvalid


def parse(name: str, content: bytes) -> dict[str, Any]:
    """Return the JSON object that is the content of an object named `name`. Raises StoreInvalid."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise StoreInvalid(f"{name} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise StoreInvalid(f"{name} cannot be read: it is no JSON object")
    return document
