"""The socket of `kybernate up`, for root of the node: the state of its models, and what is to be done with one.

A client sends one line of JSON, {"do": …, "model": …}, and gets one, with "error" where that failed. `call` is the
client's side.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from kybernate.node.failure import Failure, Invalid, Missing, Refused, Unavailable
from kybernate_shim import bounded_json

LOGS: Final = Path("/var/log/kybernate/up")  # a directory for each project
LOCKS: Final = Path("/run/kybernate/up")
LOOKS, LOOK_SECONDS = 50, 0.01  # at a lock that is taken
ASKED_BYTES: Final = 4096
ASKED_SECONDS: Final = 10.0
ANSWER_BYTES: Final = 4 << 20
CALL_SECONDS: Final = 900.0  # of what it asks for: a model may load in the meantime
KINDS: Final[Mapping[str, type[Failure]]] = {
    one.__name__: one for one in (Invalid, Missing, Refused, Unavailable, Failure)
}
Do = Callable[[Mapping[str, Any]], Awaitable[Any]]


def place(project: str) -> Path:
    """Return the socket of a project."""
    return LOCKS / f"{project}.sock"


@asynccontextmanager
async def serving(project: str, verbs: Mapping[str, Do]) -> AsyncIterator[None]:
    """Answer requests on a project's socket while the block runs. The caller holds the project's lock."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ASKED_SECONDS):
                line = await reader.readline()
            writer.write(json.dumps(await _answered(line, verbs)).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError, TimeoutError):
            pass  # the caller is gone, or says nothing
        finally:
            writer.close()

    path = place(project)
    path.unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        server = await asyncio.start_unix_server(answer, str(path), limit=ASKED_BYTES)
    finally:
        os.umask(before)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


async def _answered(line: bytes, verbs: Mapping[str, Do]) -> Mapping[str, Any]:
    try:
        asked = bounded_json.parse(line)
        if not isinstance(asked, dict) or asked.get("do") not in verbs:
            raise Invalid("the request is not understood", advice="both commands need the same version of Kybernate")
        return {"result": await verbs[asked["do"]](asked)}
    except Failure as failure:
        kind = next(name for name, one in KINDS.items() if isinstance(failure, one))
        return {"error": str(failure), "kind": kind, "state": failure.state, "advice": failure.advice}
    except ValueError as error:
        return {"error": f"the request is no JSON: {error}", "kind": "Invalid", "state": "", "advice": ""}


def call(project: str, do: str, *, seconds: float = CALL_SECONDS, **asked: Any) -> Any:
    """Ask the process that keeps a project. Raises Unavailable where there is none, and what it answers."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(seconds)
        try:
            client.connect(str(place(project)))
            client.sendall(json.dumps({"do": do, **asked}).encode() + b"\n")
            with client.makefile("rb") as lines:
                found = bounded_json.parse(lines.readline(ANSWER_BYTES) or b"null")
        except FileNotFoundError as error:
            raise Unavailable(
                f"no process keeps the models of the project {project}", advice="start it: kybernate up -d"
            ) from error
        except (OSError, ValueError) as error:
            raise Unavailable(
                f"no process keeps the models of the project {project}: {error}", advice="start it: kybernate up -d"
            ) from error
    if found is None:
        raise Unavailable(f"the process that keeps {project} has ended", state="its containers run on")
    if "error" in found:
        kind = KINDS.get(found["kind"], Failure)
        raise kind(found["error"], state=found["state"], advice=found["advice"])
    return found["result"]


def answers(project: str, seconds: float) -> bool:
    """Return whether a process keeps a project and its proxy listens; one that is being started is waited for."""
    try:
        call(project, "models", seconds=max(seconds, LOOK_SECONDS))
    except Unavailable:
        return False
    return True


def project_of(model: str) -> str:
    """Return the project of a running `kybernate up` that keeps a model of this name; "" where there is none."""
    for path in sorted(LOCKS.glob("*.sock")):
        with suppress(Failure):
            if any(model in (one["model"], *one["aliases"]) for one in call(path.stem, "models")):
                return path.stem
    return ""


def running_process(project: str) -> int:
    """Return the process that keeps a project; 0 where none does.

    By a shared lock, so that who looks is not taken for who keeps; what is written there may be of one that has ended.
    """
    try:
        with (LOCKS / f"{project}.lock").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        process = int((LOCKS / f"{project}.lock").read_text() or 0)
        return process if Path(f"/proc/{process}").exists() else 0
    except OSError:
        return 0
    return 0


def _lock(file: int) -> None:
    """Take a lock for this process alone. Others have it for a moment while they look. Raises BlockingIOError."""
    for left in range(LOOKS, -1, -1):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not left:
                raise
            time.sleep(LOOK_SECONDS)
        else:
            return


@contextmanager
def only_one(project: str) -> Iterator[None]:
    """Hold the lock of a project, which ends with the process whatever ends that. Raises Refused."""
    LOCKS.mkdir(parents=True, exist_ok=True)
    with (LOCKS / f"{project}.lock").open("a+") as file:
        try:
            _lock(file.fileno())
        except BlockingIOError as error:
            file.seek(0)
            raise Refused(
                f"process {file.read() or '?'} keeps the models of the project {project}",
                advice="stop it, or name another project in the file",
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
