"""Rows of lists have marks: a browser reads again those alone that have changed."""

from __future__ import annotations

import re
from dataclasses import replace

from kybernate.page.access import Role
from kybernate.page.known import Known
from kybernate.page.render import Query, Renderer
from kybernate.page.view import Begin, Container, End, Event, Found, Image, Operation, Put, Seat, Section

ROW = re.compile(r'<(tr|li) (id="[^"]*" data-mark="[^"]*")[^>]*>[^\0]*?</\1>')  # as page.js has it
NAMES = ('&<tr id="x" data-mark="y">', "</tr></li>", "plain")


def page(name: str) -> Known:
    known = Known()
    container = Container("k8s.io/" + name, name, name, "running", "attached", note=name)
    operation = Operation("op" + name, "wake", "failed", container.key, name, error=name, advice=name)
    objects = (container, operation, Image(name, name, name), Seat(name, title=name), Event(1, 1.0, name, "info", name))
    for change in (Found("n", ()), Begin(), *map(Put, objects), End()):
        known.apply(change)
    return known


def rows(known: Known, section: Section) -> list[str]:
    html = Renderer(known, playground=False).section(section, Query(), Role.OPERATOR)
    return [one[2] for one in ROW.finditer(html)]


def test_row_is_found_whatever_its_object_is_called() -> None:
    for name in NAMES:
        known = page(name)
        for section in (Section.CONTAINERS, Section.OPERATIONS, Section.IMAGES, Section.SEATS, Section.EVENTS):
            html = Renderer(known, playground=False).section(section, Query(), Role.OPERATOR)
            assert len(rows(known, section)) == 1, html
            assert len(re.findall("<(?:tr|li) id=", html)) == 1


def test_mark_changes_with_the_row_alone() -> None:
    known = page("plain")
    other = Container("k8s.io/other", "other", "", "running")
    known.apply(Put(other))
    first = rows(known, Section.CONTAINERS)
    known.apply(Put(replace(other, state="stopped")))
    second = rows(known, Section.CONTAINERS)
    assert [one == two for one, two in zip(first, second, strict=True)] == [False, True]
    assert rows(known, Section.CONTAINERS) == second
