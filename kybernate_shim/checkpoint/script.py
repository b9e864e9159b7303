"""The script of ours that CRIU executes at each of its steps, and how it asks this daemon.

CRIU waits for the script, and the script for the answer. The pipes vanish with the daemon: then opening or reading them
fails, and so does CRIU's step. Source: CRIU's action-scripts.c of versions 4.1 and 4.2, which agree.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.criu.config import ENVIRONMENT, Configuration, line
from kybernate_shim.errors import Refused
from kybernate_shim.native import HOLDER

SCRIPTS: Final = (HOLDER.of(), Path(__file__).with_name("hold_restored.sh"))  # compiled, and for where nothing compiles
ASK: Final = "KYBERNATE_GATE_ASK"
ANSWER: Final = "KYBERNATE_GATE_ANSWER"
PASS: Final = b"pass\n"
REFUSE: Final = b"no\n"


def arm(configuration: Configuration) -> None:
    """Make CRIU execute the script, with a line in the configuration that it reads first. Raises Refused.

    A line of the node's own configuration does not replace it there: CRIU executes every script that it is given.
    """
    script = next((one for one in SCRIPTS if os.access(one, os.X_OK)), None)
    if script is None:
        raise Refused(
            f"{SCRIPTS[-1]} cannot be executed, and without it processes cannot be held until they are compared with"
            " what is allowed, or with their image: give it mode 0755 and mount its filesystem without noexec. Nothing"
            " was changed"
        )
    with Path(configuration.environment[ENVIRONMENT]).open("a") as file:
        file.write(f"{line('action-script', str(script))}\n")


@asynccontextmanager
async def asked(answer: Callable[[str], Awaitable[bytes]]) -> AsyncIterator[dict[str, str]]:
    """Answer what the script asks while the body runs, and yield what its environment needs.

    A question is a step of CRIU's, CRIU's pid and init's; b"" is no answer, for steps that wait for none.
    """
    loop = asyncio.get_running_loop()
    ask, question_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    answer_end, reply_to = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    tasks: set[asyncio.Task[None]] = set()

    async def reply(question: str) -> None:
        if text := await answer(question):
            os.write(reply_to, text)

    def hear() -> None:
        for question in os.read(ask, 4096).decode(errors="replace").splitlines():
            tasks.add(task := asyncio.ensure_future(reply(question)))
            task.add_done_callback(tasks.discard)

    loop.add_reader(ask, hear)
    try:
        # The script opens them by these names: both are gone when this daemon is.
        yield {name: f"/proc/{os.getpid()}/fd/{fd}" for name, fd in ((ASK, question_end), (ANSWER, answer_end))}
    finally:
        loop.remove_reader(ask)
        if tasks:
            await asyncio.wait(tasks)
        for fd in (ask, question_end, answer_end, reply_to):
            os.close(fd)
