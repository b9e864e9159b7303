"""The process of a side: answers JSON lines on its standard input, with its own package.

`python -m tests.gpu.against.serve in-place|container old|new`. What anything prints goes to its standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from typing import Any

# What the benches import, and where a release before had it.
MOVED = {
    "kybernate_shim.arena.memory": "kybernate_shim.cuda.arena.memory",
    "kybernate_shim.checkpoint.gpu.room": "kybernate_shim.checkpoint.gpu_room",
    "kybernate_shim.gpu.errors": "kybernate_shim.cuda.errors",
    "kybernate_shim.gpu.helper_client": "kybernate_shim.cuda.client",
    "kybernate_shim.gpu.sequence": "kybernate_shim.cuda.sequence",
    "kybernate_shim.linux.huge_pages": "kybernate_shim.cuda.pages",
    "kybernate_shim.steps": "kybernate_shim.cuda.sequence",
}


def serve(kind: str, name: str) -> int:
    """Answer until there are no more questions; an error is an answer, too."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    served = _served(kind, name)
    try:
        for line in sys.stdin:
            question = json.loads(line)
            answers.write(json.dumps(_answer(served, question.pop("ask"), question)) + "\n")
            answers.flush()
    finally:
        served.close()
    return 0


def find_moved() -> None:
    """Have each module found by its name of now, in a package that has it under its name of before."""
    for now, before in MOVED.items():
        try:
            import_module(now)
        except ModuleNotFoundError:
            sys.modules[now] = import_module(before)


def _served(kind: str, name: str) -> Any:
    find_moved()
    # Each loads what the other side's version of the package may not have.
    if kind == "container":
        from tests.gpu.against.container import WholeContainer

        return WholeContainer(name)
    from tests.gpu.against.in_place import InPlace

    return InPlace()


def _answer(served: Any, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return getattr(served, verb)(**arguments) or {}
    except Exception as error:  # noqa: BLE001  # it is for the coordinator to judge
        traceback.print_exc()
        return {"error": "; ".join(filter(None, [served.remark(), f"{type(error).__name__}: {error}"]))}


if __name__ == "__main__":
    sys.exit(serve(*sys.argv[1:]))
