"""Steps that undo what was begun. The failure of one is reported in addition to the first error, never in its place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from types import TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Undo(ExitStack):
    """An ExitStack whose callbacks add what fails of them to the error on the way; without one, they raise."""

    def callback(self, callback: Callable[P, T], /, *args: P.args, **kwds: P.kwargs) -> Callable[P, T]:
        def leave(_kind: type[BaseException] | None, first: BaseException | None, _: TracebackType | None) -> None:
            try:
                callback(*args, **kwds)
            except Exception as error:
                if first is None:
                    raise
                add(first, error)

        self.push(leave)
        return callback


class AsyncUndo(AsyncExitStack):
    """The same, with callbacks of both kinds."""

    def callback(self, callback: Callable[P, T], /, *args: P.args, **kwds: P.kwargs) -> Callable[P, T]:
        async def call() -> None:
            callback(*args, **kwds)

        self.push_async_callback(call)
        return callback

    def push_async_callback(
        self, callback: Callable[P, Awaitable[T]], /, *args: P.args, **kwds: P.kwargs
    ) -> Callable[P, Awaitable[T]]:
        async def leave(
            _kind: type[BaseException] | None, first: BaseException | None, _: TracebackType | None
        ) -> None:
            try:
                await callback(*args, **kwds)
            except Exception as error:
                if first is None:
                    raise
                add(first, error)

        self.push_async_exit(leave)
        return callback


def add(first: BaseException, later: object) -> None:
    """Add to `first` what could not be undone after it."""
    first.add_note(f"not undone: {later}")


def in_words(error: BaseException) -> str:
    """Return the error's text and what was added to it, and to those that it was raised from."""
    words = str(error) or type(error).__name__
    cause: BaseException | None = error
    seen: list[BaseException] = []
    while cause is not None and all(cause is not one for one in seen):
        seen.append(cause)
        for note in getattr(cause, "__notes__", ()):
            words += "" if note in words else f"; {note}"
        cause = cause.__cause__
    return words
