"""JSON that comes from elsewhere: bounded in bytes, values and nesting before anything works with it.

A client that can write to a bucket, an image registry, an archive or an image's directory chooses these bytes. Python's
parser takes any nesting that its stack bears, and what is done with the values afterwards recurses with less of it.
What reads JSON by other means than this is listed, with the reason, in tests/unit/test_foreign_bytes.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

MOST_BYTES: Final = 64 << 20
MOST_VALUES: Final = 1 << 19  # 150 bytes of memory each, in the worst case
MOST_NESTED: Final = 64  # objects and arrays in each other


def parse(
    content: bytes | bytearray | memoryview | str,
    *,
    most_bytes: int = MOST_BYTES,
    most_values: int = MOST_VALUES,
    most_nested: int = MOST_NESTED,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    constant: Callable[[str], Any] | None = None,
) -> Any:
    """Return the JSON value in `content`. `pairs` and `constant` are the hooks of json.loads.

    Raises ValueError for what is not JSON, and for more bytes, values or nesting than is accepted.
    """
    if len(content) > most_bytes:
        raise ValueError(f"{len(content)} bytes, at most {most_bytes} are accepted")
    text = content.encode(errors="surrogatepass") if isinstance(content, str) else bytes(content)
    opened = text.count(b"[") + text.count(b"{")
    # Each value but the first follows one of these bytes; in a text they count as well, which texts of ours can bear.
    if opened + text.count(b",") > most_values:
        raise ValueError(f"more than {most_values} values")
    try:
        value = json.loads(
            content if isinstance(content, str) else text.decode(errors="surrogateescape"),
            object_pairs_hook=pairs,
            parse_constant=constant,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if opened > most_nested and _nested_deeper(value, most_nested):
        raise ValueError(f"nested more than {most_nested} levels deep")
    return value


def _nested_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [inner for one in level if isinstance(one, dict | list) for inner in _inside(one)]
        if not level:
            return False
    return any(isinstance(one, dict | list) for one in level)


def _inside(one: dict[str, Any] | list[Any]) -> list[Any]:
    return list(one.values()) if isinstance(one, dict) else one
