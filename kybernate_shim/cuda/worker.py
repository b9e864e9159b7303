"""A worker of the CUDA helper: the only kind of process that loads libcuda.

It reads jobs from the socket that it inherits and answers them, both as lines of JSON. A verb runs in one thread per
process, because ranks that talk to each other must be locked at the same time. A call that hangs cannot be cancelled;
the supervisor kills the worker then. Started as `python -m kybernate_shim.cuda.worker FD`; with `arena FOLDER SIZES
SHARE` behind it, it moves processes' memory to and from the arena there, too, and keeps what that needs. The first
argument of these verbs is how many seconds the job has: it ends by itself then, so that no other job has to suffer.

Job:    {"verb": "lock", "pids": [17, 18], "arguments": [1000]}, answered by one line per pid, in any order
Job:    {"verb": "info"}, answered by one line
Job:    {"verb": "ping"}, answered by one line, whatever the threads do
Answer: {"pid": 17, "verb": "lock", "code": 0, "name": "", "text": "", "seconds": 0.001, "state": null, "thread": null}
First of all comes {"ready": true} or {"unusable": "why"}.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

Send = Callable[[dict[str, Any]], None]


def main() -> None:
    """Serve jobs until the supervisor closes its end; then die at once, whatever the threads are waiting for."""
    os.umask(0o077)  # what is beside the arena is root's alone
    connection = socket.socket(fileno=int(sys.argv[1]))
    writing = threading.Lock()

    def send(message: dict[str, Any]) -> None:
        with writing:
            connection.sendall(json.dumps(message).encode() + b"\n")

    try:
        driver = _load_driver(send)
        if driver is not None:
            verbs = {**driver.VERBS, **_arena_verbs(sys.argv[2:])}
            send({"ready": True})
            for line in connection.makefile("rb"):
                _start(driver, verbs, json.loads(line), send)
    except OSError:
        pass  # the supervisor is gone
    os._exit(0)  # a thread inside the driver would keep an orderly exit waiting


def _load_driver(send: Send) -> ModuleType | None:
    """Return the module `driver` with libcuda ready behind it, or None; either is told to the supervisor."""
    try:
        from kybernate_shim.cuda import driver  # here, because it needs an optional package and this is its only user
    except ImportError as error:
        send({"unusable": f"the Python package cuda-bindings is missing ({error}): install kybernate[gpu]"})
        return None
    try:
        driver.initialize()
    except driver.DriverUnusable as error:
        send({"unusable": str(error)})
        return None
    return driver


def _arena_verbs(arguments: Sequence[str]) -> Mapping[str, Callable[..., Any]]:
    if not arguments:
        return {}
    from kybernate_shim.cuda.arena.banks import from_text  # only one worker of a node needs these
    from kybernate_shim.cuda.arena.memory import Memory
    from kybernate_shim.cuda.arena.moves import Mover

    _, folder, sizes, share = arguments
    return Mover(Memory(from_text(sizes), Path(folder), float(share))).verbs


def _start(driver: ModuleType, verbs: Mapping[str, Callable[..., Any]], job: dict[str, Any], send: Send) -> None:
    if job["verb"] == "info":
        threading.Thread(target=lambda: send(driver.info()), daemon=True).start()
    verb = job["verb"]
    if verb == "ping":
        send({"verb": verb, "pid": 0})
    for pid in job.get("pids", ()):
        work = partial(verbs[verb], pid, *job["arguments"])
        threading.Thread(target=_call, args=(driver, work, {"pid": pid, "verb": verb}, send), daemon=True).start()


def _call(driver: ModuleType, work: Callable[[], Any], about: dict[str, Any], send: Send) -> None:
    began = time.monotonic()
    try:
        answer = work()
    except Exception as error:  # noqa: BLE001  # what the bindings raise for a missing call is the answer
        answer = driver.Answer(driver.NOT_FOUND, "CUDA_ERROR_NOT_FOUND", str(error))
    send(about | {"seconds": time.monotonic() - began} | asdict(answer))


if __name__ == "__main__":
    main()
