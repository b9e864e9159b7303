"""HTML from what is known: one template for each section, escaped, with a cache by version for all that look."""

from __future__ import annotations

import gzip
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode
from zlib import crc32

from jinja2 import Environment, PackageLoader, StrictUndefined

from kybernate.cli.output import seconds, size
from kybernate.page.access import Role
from kybernate.page.known import Known, rows, why
from kybernate.page.source import Action
from kybernate.page.view import Section

CACHED: Final = 256  # rendered sections
PACKED: Final = 32  # compressed answers
LEVEL: Final = 5  # of compression: 9 takes twice as long for a twentieth less
WANTED_CHARACTERS: Final = 200  # of a search
ALSO: Final[Mapping[Section, tuple[Section, ...]]] = {  # what a section shows of others
    Section.GPUS: (Section.CONTAINERS,),
    Section.CONTAINERS: (Section.SEATS,),
    Section.TIERS: (Section.IMAGES,),
    Section.WHY: (Section.CONTAINERS, Section.GPUS, Section.OPERATIONS, Section.SEATS),
}
LABELS: Final[Mapping[Action, str]] = {
    Action.WAKE: "Wake",
    Action.SLEEP: "Sleep",
    Action.CHECKPOINT: "Checkpoint",
    Action.RESTORE: "Restore",
    Action.PIN: "Pin",
    Action.UNPIN: "Unpin",
}


@dataclass(frozen=True)
class Query:
    """Which part of a list is looked at. From the address of a request, so it may be anything."""

    number: int = 1
    wanted: str = ""
    level: str = ""
    container: str = ""

    @classmethod
    def of(cls, values: Mapping[str, str]) -> Query:
        """Return the query of an address; what is no such query is left out."""
        number = values.get("page", "")
        return cls(
            int(number) if number.isascii() and number.isdigit() and len(number) < 8 else 1,
            values.get("q", "")[:WANTED_CHARACTERS],
            values.get("level", "") if values.get("level") in ("info", "warning", "error") else "",
            values.get("container", "")[:WANTED_CHARACTERS],
        )

    def at(self, number: int) -> str:
        """Return the query of another page of the same list, as an address has it."""
        values = {"page": str(number), "q": self.wanted, "level": self.level, "container": self.container}
        return urlencode({name: value for name, value in values.items() if value})


class Renderer:
    """Makes the page of what is known, for a role."""

    def __init__(self, known: Known, *, playground: bool) -> None:
        self._known = known
        self._cache: OrderedDict[tuple[Section, Query, Role, int], str] = OrderedDict()
        self._packed: OrderedDict[tuple[tuple[Section, ...], Query, Role, tuple[int, ...]], bytes] = OrderedDict()
        self._environment = Environment(
            loader=PackageLoader("kybernate.page"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(size=size, clock=clock, seconds=seconds, mark=mark)
        self._environment.globals.update(
            Section=Section, Action=Action, LABELS=LABELS, playground=playground, version=self.version
        )

    def section(self, section: Section, query: Query, role: Role) -> str:
        """Return a section as HTML."""
        key = section, query, role, self.version(section)
        if (found := self._cache.get(key)) is None:
            found = self._cache[key] = self.render(f"section/{section}.html", role, query=query, **self._facts(query))
            while len(self._cache) > CACHED:
                self._cache.popitem(last=False)
        return found

    def packed(self, names: tuple[Section, ...], query: Query, role: Role) -> bytes:
        """Return sections as compressed HTML: once for all that look at the same."""
        key = names, query, role, tuple(map(self.version, names))
        if (found := self._packed.get(key)) is None:
            html = self.sections(names, query, role).encode("utf-8", "replace")
            found = self._packed[key] = gzip.compress(html, LEVEL, mtime=0)
            while len(self._packed) > PACKED:
                self._packed.popitem(last=False)
        return found

    def sections(self, names: Sequence[Section], query: Query, role: Role) -> str:
        """Return sections as HTML, each in an element that names it."""
        html = "<div data-section='{}'>{}</div>\n"
        return "".join(html.format(one, self.section(one, query, role)) for one in names)

    def render(self, template: str, role: Role, **facts: Any) -> str:
        """Return a template as HTML."""
        return self._environment.get_template(template).render(known=self._known, role=role, rows=rows, **facts)

    def version(self, section: Section) -> int:
        """Return what changes with all that a section shows."""
        version = self._known.version
        return version[Section(section)] + sum(version[other] for other in ALSO.get(section, ()))

    def _facts(self, query: Query) -> dict[str, Any]:
        selected = self._known.container(query.container) if query.container else None
        return {"selected": selected, "why": why(selected, self._known) if selected else ""}


def mark(row: str) -> str:
    """Return what changes with a row's HTML: browsers keep rows whose mark is the same, and do not read them again."""
    return f"{crc32(row.encode('utf-8', 'replace')):08x}"


def clock(then: float) -> str:
    """Return a time as RFC 3339 in UTC, which the page's script shows in the reader's own; "" for 0."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(then)) if then else ""
