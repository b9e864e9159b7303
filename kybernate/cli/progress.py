"""A progress bar on stderr while a shim works. Where stderr is no terminal, nothing is shown."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kybernate_shim.messages.shim_pb2 import Container


class Bar:
    """One bar for one operation: its step, and how far that is. Shown inside a `with`."""

    def __init__(self, verb: str) -> None:
        console = Console(stderr=True)
        self._verb = verb
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(verb, total=None)

    def show(self, status: Container) -> None:
        """Take over what the shim says about its container."""
        words = f"{self._verb}: {status.step}" if status.step else self._verb
        self._progress.update(
            self._task, description=words, completed=status.done_bytes, total=status.total_bytes or None
        )

    def count(self, done: int, total: int) -> None:
        """Show `done` of `total` bytes. May be called from any thread."""
        self._progress.update(self._task, completed=done, total=total)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
