"""The wait for a program to be executed ends, whatever its deadline."""

from __future__ import annotations

import asyncio
import os

import pytest

from kybernate_shim.oci import exec_fifo
from kybernate_shim.oci.exec_fifo import executed, program_of


@pytest.mark.parametrize("seconds", [0, 3600])
def test_program_that_is_never_executed_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Such as one on a filesystem that hangs; 0 is a deadline that never comes."""
    monkeypatch.setattr(exec_fifo, "EXEC_SECONDS", 0.01)
    me = os.getpid()
    asyncio.run(asyncio.wait_for(executed(me, program_of(me), seconds), 20))


def test_executed_program_is_not_waited_for() -> None:
    asyncio.run(asyncio.wait_for(executed(os.getpid(), (0, 0), 0), 20))
