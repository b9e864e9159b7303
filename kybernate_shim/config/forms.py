"""The forms that values of settings have: in words, for the manual and for errors, and as parsers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kybernate_shim.sizes import HUGE_PAGE, NO_NODE, NodeSizes

MOST_THREADS: Final = 256
Addresses = tuple[tuple[str, str], ...]  # names, and HOST:PORT of each


@dataclass(frozen=True)
class SettingForm:
    """What a value must look like, in words and as a parser that raises ValueError."""

    words: str
    parse: Callable[[object], Any]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _switch(value: object) -> bool | None:
    if value == "auto":
        return None
    if not isinstance(value, bool):
        raise ValueError
    return value


def _yes_or_no(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError
    return float(value)


def _hold(value: object) -> float:
    number = _seconds(value)
    if not 0 < number <= 86400:
        raise ValueError
    return number


def _share(value: object) -> float:
    number = _seconds(value)
    if not 0 < number <= 1:
        raise ValueError
    return number


def _directory(value: object) -> Path:
    path = Path(_text(value))
    if not path.is_absolute():
        raise ValueError
    return path


def _optional_path(value: object) -> Path | None:
    return None if value == "" else _directory(value)


def _criu(value: object) -> Path | None:
    path = _optional_path(value)
    if path is not None and path.name != "criu":
        raise ValueError
    return path


def _level(value: object) -> str:
    if value not in ("debug", "info", "warning", "error"):
        raise ValueError
    return _text(value)


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError
    return tuple(_text(item) for item in value)


def _directories(value: object) -> tuple[Path, ...]:
    return tuple(map(_directory, _texts(value)))


def among(*words: str) -> SettingForm:
    def parse(value: object) -> str:
        if value not in words:
            raise ValueError
        return _text(value)

    return SettingForm(" or ".join(f'"{word}"' for word in words), parse)


def _whole_number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_THREADS:
        raise ValueError
    return value


def _bytes(value: object) -> int:
    """Read "48GiB", "512 MiB" or a plain number of bytes."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError
    number, unit = (str(value), "") if isinstance(value, int) else _split_unit(value)
    if not number.isdecimal():
        raise ValueError
    return int(number) << UNITS[unit]


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError
    return value


def _listen(value: object) -> str:
    text = _text(value)
    host, _, port = text.rpartition(":")
    if text and not (host and port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError
    return text


def _addresses(value: object) -> Addresses:
    if not isinstance(value, dict):
        raise ValueError
    found = tuple((_text(name), _listen(address)) for name, address in value.items())
    if not all(name and address for name, address in found):
        raise ValueError
    return found


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError
    sizes = tuple(map(_bytes, value))
    if not all(sizes) or any(size % HUGE_PAGE for size in sizes):
        raise ValueError
    return sizes


def _node_sizes(value: object) -> NodeSizes:
    """Read bytes, or a table of them whose keys are numbers of NUMA nodes; what is 0 is left out."""
    table = value if isinstance(value, dict) else {str(NO_NODE): value}
    if isinstance(value, dict) and not all(isinstance(node, str) and node.isdecimal() for node in value):
        raise ValueError
    return tuple(sorted((int(node), size) for node, one in table.items() if (size := _bytes(one))))


def _split_unit(text: str) -> tuple[str, str]:
    unit = next((name for name in UNITS if name and text.endswith(name)), "")
    return text.removesuffix(unit).strip(), unit


UNITS: Final[Mapping[str, int]] = {"": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
TEXT = SettingForm("a string", _text)
SWITCH = SettingForm('"auto", true or false', _switch)
SIZES = SettingForm('a list of numbers of bytes, such as ["18GiB", "18GiB"], multiples of 2 MiB', _sizes)
NODE_SIZES = SettingForm(
    'a number of bytes, such as "64GiB", or one for each NUMA node, such as { 0 = "32GiB", 1 = "32GiB" }', _node_sizes
)
YES_OR_NO = SettingForm("true or false", _yes_or_no)
SECONDS = SettingForm("a number of seconds, 0 or more", _seconds)
HOLD = SettingForm("a number of seconds, above 0 and up to 86400", _hold)
COUNT = SettingForm("a whole number, 1 or more", _count)
BYTES = SettingForm('a number of bytes, such as "64GiB"', _bytes)
LISTEN = SettingForm('HOST:PORT, or "" for none', _listen)
ADDRESSES = SettingForm('a table of names and HOST:PORT, such as { node-1 = "10.0.0.1:7443" }', _addresses)
SHARE = SettingForm("a number above 0 and up to 1", _share)
DIRECTORY = SettingForm("an absolute path", _directory)
OPTIONAL_PATH = SettingForm('an absolute path, or "" for none', _optional_path)
CRIU = SettingForm(
    'an absolute path that ends in /criu, the name that runtimes look for in PATH, or "" for PATH', _criu
)
LEVEL = SettingForm('"debug", "info", "warning" or "error"', _level)
TEXTS = SettingForm("a list of strings", _texts)
DIRECTORIES = SettingForm("a list of absolute paths", _directories)
THREADS = SettingForm(f"a number from 1 to {MOST_THREADS}, 0 to choose", _whole_number)
