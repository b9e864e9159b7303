"""The manual's table of all settings, from the lines that declare them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kybernate_shim.config.declaring import NODE, Setting, keys
from kybernate_shim.config.settings import Config


@dataclass(frozen=True)
class Row:
    """One key as the manual's table shows it. `default` is what to write into the file to get the default."""

    key: str
    default: str
    form: str
    by: str
    since: str
    doc: str


def documented(kind: type[Any] = Config, prefix: str = "") -> Iterator[Row]:
    """Yield a row for every key, tables after the keys before them, in the order of declaration."""
    for key in keys(kind):
        if "table" in key.metadata:
            yield from documented(key.metadata["table"], f"{prefix}{key.name}.")
            continue
        rule: Setting = key.metadata["setting"]
        default = rule.unset or f"`{_toml(key.default)}`"
        yield Row(prefix + key.name, default, rule.form.words, rule.by, rule.since, rule.doc)


def markdown_table(kind: type[Any] = Config) -> str:
    """Return the table of all keys for the manual. Who may change them is left out where all are the node's."""
    rows = list(documented(kind))
    shown = any(row.by != NODE for row in rows)
    lines = [_cells("key", "default", "value", *(["changed by"] if shown else []), "in effect", "meaning")]
    lines.append("|" + "---|" * (6 if shown else 5))
    for row in rows:
        by = [row.by] if shown else []
        lines.append(_cells(f"`{row.key}`", row.default, row.form, *by, row.since, row.doc))
    return "\n".join(lines) + "\n"


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:g}"
    return f'"{value}"'
