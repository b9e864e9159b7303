"""The shim's command line, as containerd spells it: flags with one dash, then an action word.

Parsed by hand, because argparse would cost more than the rest of `start` together, twice per container.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kybernate_shim.errors import Invalid

_SWITCHES = frozenset({"debug", "v", "info"})
_VALUES = frozenset({"namespace", "id", "socket", "bundle", "address", "publish-binary"})


class Invocation(NamedTuple):
    """One call of the binary. `action` is "start", "delete", or empty for `-v` and `-info`.

    `without_server`, which is not from the command line, says why no fork server has done it.
    """

    action: str = ""
    namespace: str = ""
    id: str = ""
    address: str = ""
    publish_binary: str = ""
    bundle: str = ""
    socket: str = ""
    debug: bool = False
    v: bool = False
    info: bool = False
    without_server: str = ""


def parse(argv: Sequence[str]) -> Invocation:
    """Read `argv` (without the program's name) in any of Go's spellings: -x v, -x=v, --x v, --x=v.

    Flags that we do not know are skipped, so that a newer containerd still finds its way.
    Raises Invalid.
    """
    found: dict[str, str | bool] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            if word not in ("start", "delete"):
                raise Invalid(f"unknown action {word!r}: expected start or delete")
            found["action"] = word
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if name in _SWITCHES:
            found[name] = value.lower() not in ("false", "0", "f") if equals else True
        elif name in _VALUES:
            if not equals:
                if not words:
                    raise Invalid(f"flag -{name} needs a value")
                value = words.pop(0)
            found[name.replace("-", "_")] = value
    return Invocation(**found)  # type: ignore[arg-type]  # the two tables above give each name its type
