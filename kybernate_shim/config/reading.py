"""Reads settings from a parsed TOML document, and reports all of its problems together.

An unknown key is a warning, so that a file may be newer than the shim. A value of the wrong form is an error, because
continuing with the default would run containers in a way that the file forbids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from kybernate_shim.config.declaring import LIVE, NODE, OPTIONS, Setting, keys

DEFAULT_PATH: Final = Path("/etc/kybernate/shim.toml")
T = TypeVar("T")
Read = tuple[T, tuple[str, ...]]  # the settings, and sentences about keys that have no effect


class ConfigInvalid(Exception):
    """A configuration that cannot be used. The message names the source and every wrong key."""

    def __init__(self, source: str, problems: list[str]) -> None:
        super().__init__(f"{source}: {'; '.join(problems)}")


def read_file(old: T, path: Path) -> Read[T]:
    """Return the settings `old` with those of a file in their place, and warnings; a missing file changes nothing.

    Raises ConfigInvalid.
    """
    try:
        content = path.read_text()
    except FileNotFoundError:
        return old, ()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(str(path), [f"cannot be read: {error}"]) from error
    return read(old, content, source=str(path), by=NODE)


def read(old: T, new: str | Mapping[str, Any], *, source: str, by: str) -> Read[T]:
    """Return the settings `old` with those of `new`, TOML text or its parsed form, in their place, and warnings.

    With `by=OPTIONS`, keys that only the node's file may set are left out with a warning. Raises ConfigInvalid.
    """
    if isinstance(new, str):
        import tomllib  # here, because the first container of a node waits for every import

        try:
            new = tomllib.loads(new)
        except tomllib.TOMLDecodeError as error:
            raise ConfigInvalid(source, [f"not TOML: {error}"]) from error
    reading = Reading(source, by)
    result = reading.into(old, new)
    if reading.problems:
        raise ConfigInvalid(source, reading.problems)
    return result, tuple(reading.warnings)


def keeping(old: T, new: T) -> T:
    """Return `new`, but for the settings that a container keeps for as long as it lives: these are as in `old`."""
    changes: dict[str, Any] = {}
    for key in keys(type(old)):
        mine, other = getattr(old, key.name), getattr(new, key.name)
        if "table" in key.metadata:
            changes[key.name] = keeping(mine, other)
        elif key.metadata["setting"].since != LIVE:
            changes[key.name] = mine
    return replace(new, **changes)  # type: ignore[type-var]  # T is always a dataclass of settings


@dataclass
class Reading:
    """One pass over a parsed TOML document, which collects what is wrong with it."""

    source: str
    by: str
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def into(self, old: T, values: Mapping[str, Any], prefix: str = "") -> T:
        """Return the dataclass `old` with `values` in it."""
        known = {key.name: key for key in keys(type(old))}
        changes: dict[str, Any] = {}
        for name, value in values.items():
            key = prefix + name
            if name not in known:
                self.warnings.append(f"{self.source}: unknown key {key}{_nearest(name, known, prefix)}")
            elif "table" in known[name].metadata:
                self._table(changes, getattr(old, name), name, value, key)
            else:
                self._value(changes, known[name].metadata["setting"], name, value, key)
        return replace(old, **changes)  # type: ignore[type-var]  # T is always a dataclass of settings

    def _table(self, changes: dict[str, Any], old: object, name: str, value: object, key: str) -> None:
        if isinstance(value, dict):
            changes[name] = self.into(old, value, f"{key}.")
        else:
            self.problems.append(f"{key} must be a table, not {_shown(value)}")

    def _value(self, changes: dict[str, Any], rule: Setting, name: str, value: object, key: str) -> None:
        if self.by == OPTIONS and rule.by == NODE:
            self.warnings.append(f"{self.source}: {key} has no effect here, only in {DEFAULT_PATH}")
            return
        try:
            changes[name] = rule.form.parse(value)
        except ValueError:
            self.problems.append(f"{key} must be {rule.form.words}, not {_shown(value)}")


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"


def _nearest(name: str, known: Mapping[str, object], prefix: str) -> str:
    try:
        from difflib import get_close_matches  # needed for a misspelt file only
    except ImportError:
        return ""  # a daemon may outlive the files of its interpreter
    near = get_close_matches(name, known, 1)
    return f" (did you mean {prefix}{near[0]}?)" if near else ""
