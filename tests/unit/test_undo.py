"""Undoing: the first error stays, what fails after it is told besides, and every step is tried."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kybernate_shim.undo import AsyncUndo, Undo, in_words


class Unfit(Exception):
    pass


def failing(word: str) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(word)

    return fail


def test_first_error_stays_and_all_steps_are_tried() -> None:
    done: list[str] = []

    def work() -> None:
        with Undo() as undo:
            undo.callback(done.append, "last")
            undo.callback(failing("second"))
            undo.callback(failing("first"))
            raise Unfit("why")

    with pytest.raises(Unfit) as caught:
        work()
    assert in_words(caught.value) == "why; not undone: first; not undone: second"
    assert done == ["last"]


def test_first_error_stays_among_steps_of_both_kinds() -> None:
    async def fail() -> None:
        raise OSError("waiting")

    async def main() -> None:
        async with AsyncUndo() as undo:
            undo.push_async_callback(fail)
            undo.callback(failing("at once"))
            raise Unfit("why")

    with pytest.raises(Unfit) as caught:
        asyncio.run(main())
    assert in_words(caught.value) == "why; not undone: at once; not undone: waiting"


def test_step_that_fails_by_itself_is_an_error() -> None:
    def work() -> None:
        with Undo() as undo:
            undo.callback(failing("second"))
            undo.callback(failing("first"))

    with pytest.raises(OSError, match="first") as caught:
        work()
    assert in_words(caught.value) == "first; not undone: second"


def test_steps_that_are_kept_are_not_done() -> None:
    async def main() -> None:
        async with AsyncUndo() as undo:
            undo.callback(failing("never"))
            undo.pop_all()

    asyncio.run(main())
    with Undo() as undo:
        undo.callback(failing("never"))
        undo.pop_all()


def test_words_of_an_error_have_what_was_added_to_its_cause_once() -> None:
    cause = OSError("disk")
    cause.add_note("not undone: mount")
    translated = Unfit("no image: disk")
    translated.__cause__ = cause
    assert in_words(translated) == "no image: disk; not undone: mount"
    told = Unfit("no image: disk; not undone: mount")
    told.__cause__ = cause
    assert in_words(told) == "no image: disk; not undone: mount"
    assert in_words(Unfit()) == "Unfit"


def test_words_of_an_error_that_is_its_own_cause_end() -> None:
    first, second = Unfit("first"), Unfit("second")
    first.__cause__, second.__cause__ = second, first
    second.add_note("not undone: mount")
    assert in_words(first) == "first; not undone: mount"
