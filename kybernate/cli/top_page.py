"""The live page of `kybernate top`, by textual: tables that scroll and sort, and keep working without the agent.

A thread follows the agent's changes; the page is drawn again once a second and after each key.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Static

from kybernate.cli.top_tables import SORTS, TABLES, LiveTable, heading
from kybernate.client import Agent, AgentUnreachable
from kybernate.client.watching import NodeView
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure

KINDS = ("container", "gpu", "operation", "tier")
DRAW_SECONDS = 1.0
HELP = """\
Keys
  n, s, z, a   sort all tables by name, state, size or age
  r            reverse the order
  tab          go to the next table
  arrows       move within a table; page up and page down scroll
  ?            show or hide this help
  q            quit
"""


class TopPage(App[None]):
    """The page. `follow` fills the view, in a thread, and is given what to call with words of trouble, "" for none.

    It ends after `seconds`, where that is not 0.
    """

    CSS = """
    #heading { height: 1; }
    #trouble { color: $error; height: auto; display: none; }
    #help { height: auto; display: none; border: round $primary; }
    .title { text-style: bold; margin-top: 1; height: 1; }
    DataTable { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        ("question_mark", "help", "Help"),
        ("n", "sort('name')", "Name"),
        ("s", "sort('state')", "State"),
        ("z", "sort('size')", "Size"),
        ("a", "sort('age')", "Age"),
        ("r", "reverse", "Reverse"),
        Binding("pagedown", "page(1)", show=False, priority=True),  # of the page; a table has the keys else
        Binding("pageup", "page(-1)", show=False, priority=True),
    ]
    ENABLE_COMMAND_PALETTE = False
    FOLLOWER = "follow the agent"  # name of the thread

    def __init__(
        self,
        node: wire.Node,
        follow: Callable[[NodeView, Callable[[str], None]], None],
        clock: Callable[[], float] = time.time,
        seconds: float = 0,
    ) -> None:
        super().__init__()
        self.view = NodeView()
        self.trouble = ""
        self.order, self.reversed = SORTS[0], False
        self._node, self._follow, self._clock = node, follow, clock
        self._seconds = seconds
        self._drawn: dict[str, list[tuple[str, ...]]] = {}

    def compose(self) -> ComposeResult:
        yield Static(heading(self._node), id="heading", markup=False)
        yield Static("", id="trouble", markup=False)
        yield Static(HELP, id="help", markup=False)
        with VerticalScroll():
            for one in TABLES:
                yield Static(one.title, classes="title", markup=False)
                table: DataTable[str] = DataTable(id=one.title.lower(), cursor_type="row", zebra_stripes=False)
                table.add_columns(*one.columns)
                yield table
        yield Footer()

    def on_mount(self) -> None:
        threading.Thread(target=self._run, name=self.FOLLOWER, daemon=True).start()
        self.set_interval(DRAW_SECONDS, self.draw)
        if self._seconds:
            self.set_timer(self._seconds, self.exit)
        self.draw()

    def _run(self) -> None:
        self._follow(self.view, self._note)

    def _note(self, trouble: str) -> None:
        self.trouble = trouble

    def draw(self) -> None:
        """Draw what has changed; the cursor and what is scrolled stay."""
        trouble = self.query_one("#trouble", Static)
        trouble.update(self.trouble)
        trouble.display = bool(self.trouble)
        now = self._clock()
        for one in TABLES:
            self._draw_table(one, now)

    def _draw_table(self, one: LiveTable, now: float) -> None:
        rows = one.sorted(self.view, now, self.order, reverse=self.reversed)
        cells = [row.cells for row in rows]
        if self._drawn.get(one.title) == cells:
            return
        self._drawn[one.title] = cells
        table: DataTable[Any] = self.query_one(f"#{one.title.lower()}", DataTable)
        place = table.cursor_row
        table.clear()
        for row in rows:
            table.add_row(*row.cells, key=row.key)
        if rows:
            table.move_cursor(row=min(place, len(rows) - 1), scroll=False)

    def action_sort(self, order: str) -> None:
        """Sort all tables."""
        self.order = order
        self.draw()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self.reversed = not self.reversed
        self.draw()

    def action_page(self, direction: int) -> None:
        """Scroll the page up or down by a screen."""
        scroll = self.query_one(VerticalScroll)
        scroll.scroll_to(y=scroll.scroll_y + direction * scroll.size.height, animate=False)

    def action_help(self) -> None:
        """Show or hide the help."""
        self.query_one("#help").display = not self.query_one("#help").display


def following(agent: Agent) -> Callable[[NodeView, Callable[[str], None]], None]:
    """Return what fills a view from an agent until the program ends, over its restarts."""

    def follow(view: NodeView, note: Callable[[str], None]) -> None:
        def away(error: AgentUnreachable) -> None:
            note(f"{error}; the page shows what was known before")

        try:
            for change in agent.follow(KINDS, on_trouble=away):
                note("")
                view.take(change)
        except Failure as error:
            note(str(error))

    return follow
