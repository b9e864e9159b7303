"""How a table of settings is declared: a frozen dataclass, each of whose fields is a `setting` or a `table`."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any, Final

from kybernate_shim.config.forms import SettingForm

NODE: Final = "node"  # only the node's own file may set it
OPTIONS: Final = "options"  # the runtime options that come with a container may change it

# When a change of the node's file is in effect.
LIVE: Final = "immediately"  # at the next call; a running operation keeps its settings
CONTAINER: Final = "new containers"
POD: Final = "new pods"
SERVER: Final = "next fork server"
RESTART: Final = "next start"  # of the program whose file it is


@dataclass(frozen=True)
class Setting:
    """How a key is read and documented. `by` is NODE or OPTIONS; `unset` says what an empty default leads to.

    `since` says for what a change of the file is in effect: LIVE, CONTAINER, POD, SERVER or RESTART.
    """

    form: SettingForm
    doc: str
    by: str
    unset: str
    since: str


def setting(default: object, form: SettingForm, doc: str, *, by: str = NODE, unset: str = "", since: str = LIVE) -> Any:
    """Declare a key of a configuration table."""
    return field(default=default, metadata={"setting": Setting(form, doc, by, unset, since)})


def table(kind: type[Any]) -> Any:
    """Declare a table in the table; `kind` is a frozen dataclass of settings that all have defaults."""
    return field(default_factory=kind, metadata={"table": kind})


def keys(kind: type[Any]) -> list[Field[Any]]:
    """Return the settings and tables of a table, in the order of declaration."""
    return [key for key in fields(kind) if key.metadata]
