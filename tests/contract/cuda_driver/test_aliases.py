"""The pretended driver, as the real one was measured: memory at several addresses, and calls while it is locked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.gpu.helper_client import CudaHelper
from tests.contract.cuda_driver.helper_processes import PATIENCE
from tests.fakes.actor import eventually
from tests.fakes.cuda import Gpus
from tests.fakes.cuda.programs import Asked

Run = Callable[[Callable[[CudaHelper], Any]], Any]
MIB = 1 << 20
CONTEXT, MEMORY = 8 * MIB, 4 * MIB
MOMENT = 0.2
INVALID_VALUE, NOT_FOUND = 1, 500
AT_ONCE = {"cuMemcpyHtoD", "cuMemcpyDtoHAsync", "cuMemcpyDtoD", "cuPointerGetAttribute"}
LATER = {"cuMemsetD32": INVALID_VALUE, "cuMemGetAddressRange": NOT_FOUND}


@pytest.fixture
def aliases(gpus: Gpus, libraries: Path) -> Iterator[Asked]:
    started = Asked(gpus, libraries, ["-m", "tests.fakes.cuda.aliases"])
    yield started
    started.kill()


def answers(program: Asked) -> dict[str, int]:
    told = program.ask("answers")
    return {name: int(code) for name, _, code in (one.partition("=") for one in told.split(", ") if one)}


def test_memory_is_one_at_all_its_addresses_and_stays_so(use: Run, aliases: Asked, gpus: Gpus) -> None:
    async def body(helper: CudaHelper) -> None:
        for value in (1, 2):
            aliases.ask(f"write {value} {value}")
            assert aliases.ask("content") == str(value)
            assert gpus.used()[0] == CONTEXT + MEMORY
            await helper.lock([aliases.pid], PATIENCE)
            await helper.checkpoint([aliases.pid], PATIENCE)
            assert gpus.used()[0] == 0
            await helper.restore([aliases.pid], PATIENCE)
            await helper.unlock([aliases.pid], PATIENCE)
            assert aliases.ask("content") == str(value)

    use(body)


def test_several_mappings_are_unmapped_by_one_call_and_a_part_of_one_by_none(aliases: Asked) -> None:
    aliases.ask("write 0 7")
    assert aliases.ask("cut") == str(INVALID_VALUE)
    assert aliases.ask("content") == "7"
    assert aliases.ask("unmap") == "0"


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_pointers_of_copies_are_looked_at_before_the_lock(
    use: Run, aliases: Asked, mapped: bool, checkpointed: bool
) -> None:
    at_once = {"cuPointerGetAttribute": 0} if mapped else dict.fromkeys(AT_ONCE, INVALID_VALUE)
    at_last = dict.fromkeys(AT_ONCE | LATER.keys(), 0) if mapped else at_once | LATER

    async def body(helper: CudaHelper) -> None:
        if not mapped:
            assert aliases.ask("unmap") == "0"
        await helper.lock([aliases.pid], PATIENCE)
        if checkpointed:
            await helper.checkpoint([aliases.pid], PATIENCE)
        aliases.ask("call")
        assert eventually(lambda: answers(aliases).keys() >= at_once.keys(), seconds=PATIENCE), answers(aliases)
        assert not eventually(lambda: answers(aliases) != at_once, seconds=MOMENT), answers(aliases)
        if checkpointed:
            await helper.restore([aliases.pid], PATIENCE)
        await helper.unlock([aliases.pid], PATIENCE)

    use(body)
    assert eventually(lambda: answers(aliases).keys() == at_last.keys(), seconds=PATIENCE), answers(aliases)
    assert answers(aliases) == at_last
