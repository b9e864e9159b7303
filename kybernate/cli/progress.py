"""A progress bar on stderr while a shim works. Where stderr is not a terminal, nothing is shown."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kybernate.messages import agent_pb2 as wire
    from kybernate.verbs.model import Report
    from kybernate_shim.messages.shim_pb2 import Container


class Bar:
    """One bar for one operation: its step, and how far that is, in bytes or `counted`. Shown inside a `with`."""

    def __init__(self, verb: str, *, counted: bool = False) -> None:
        self._verb = verb
        self._progress: Any = _on_terminal(counted) if sys.stderr.isatty() else _Hidden()
        self._task = self._progress.add_task(verb, total=None)

    def show(self, status: Container) -> None:
        """Take over what the shim says about its container."""
        self._show(status.step, status.done_bytes, status.total_bytes)

    def show_progress(self, progress: wire.Progress) -> None:
        """Take over what the agent reports about its operation."""
        self._show(progress.step, progress.done_bytes, progress.total_bytes)

    def report(self, report: Report) -> None:
        """Take over what a verb reports that this process carries out."""
        self._show(report.step, report.done_bytes, report.total_bytes)

    def _show(self, step: str, done: int, total: int) -> None:
        words = f"{self._verb}: {step}" if step else self._verb
        self._progress.update(self._task, description=words, completed=done, total=total or None)

    def count(self, done: int, total: int) -> None:
        """Show `done` of `total`. May be called from any thread."""
        self._progress.update(self._task, completed=done, total=total)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class _Hidden:
    """What a bar needs of rich's Progress, where nothing is shown."""

    def add_task(self, *_: object, **__: object) -> int:
        return 0

    def update(self, *_: object, **__: object) -> None:
        pass

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass


def _on_terminal(counted: bool) -> Any:
    """Return rich's Progress. It is loaded here, because most calls are of programs, and to load it takes long."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn() if counted else DownloadColumn(binary_units=True),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
