"""Runs one program of the zoo: `python -m tests.gpu.zoo.payload WORK [--mib N] [--device cpu] [--rounds N]`.

It works until it is killed, or for so many rounds. Status 3: a figure was wrong; 0 with "impossible: …": the machine
lacks what it needs. See `figures` for what it prints.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

from tests.gpu.zoo.figures import Impossible, Options, Round, Wrong, prove, say

# By module, which is loaded only for its own programs: torch takes seconds.
WORKS = {
    "driver_programs": ("copies", "memset", "pointers", "graphs", "events", "kernels", "virtual", "pools", "threads"),
    "bindings_program": ("bindings",),
    "process_programs": ("children", "ipc", "nccl", "torch_shared"),
    "refused_programs": ("managed", "imported"),
    "monitor_programs": ("nvml", "nvml_in_c", "torch_watched"),
    "torch_programs": ("allocator", "amp", "libraries", "torch_graph", "compiled", "loader"),
    "transformer_programs": ("generate", "http"),
}


def program(work: str) -> Callable[[Options], Round]:
    (module,) = (name for name, works in WORKS.items() if work in works)
    found: Callable[[Options], Round] = getattr(importlib.import_module(f"tests.gpu.zoo.{module}"), work)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    options = Options(arguments.mib, arguments.device, arguments.prefix)
    threading.excepthook = _end_with_thread
    try:
        prove(program(arguments.work)(options), arguments.prefix, arguments.rounds)
    except Impossible as reason:
        say(f"impossible: {reason}")
        return 0
    except Wrong as what:
        say(f"wrong: {what}")
        return 3
    except Exception as error:  # noqa: BLE001  # on the standard output, which is what the log keeps
        say(f"wrong: {type(error).__name__}: {str(error)[:400]}")
        traceback.print_exc()
        return 3
    return 0


def _end_with_thread(failure: threading.ExceptHookArgs) -> None:
    """A thread that fails ends the program: its work is part of what is checked."""
    say(f"wrong: in a thread: {failure.exc_type.__name__}: {str(failure.exc_value)[:400]}")
    traceback.print_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
    os._exit(3)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="tests.gpu.zoo.payload", description=(__doc__ or "").partition("\n")[0])
    found.add_argument("work", choices=[work for works in WORKS.values() for work in works])
    found.add_argument("--mib", type=int, default=256, help="size of what it keeps (256)")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--prefix", default="", help="before each line, such as '0: '")
    found.add_argument("--rounds", type=int, help="end after so many")
    return found


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads that work forever are ended with it, whatever library they are in
