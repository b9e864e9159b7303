"""`kybernate cuda`: the driver's steps by hand, for tests and for a process that was left locked."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.output import seconds, show_columns, size
from kybernate.node import cuda

HELP = {
    "state": "Show the state of processes: running, locked, checkpointed, failed, or none without CUDA.",
    "lock": "Wait until queued work has drained, and block further calls to the driver.",
    "checkpoint": "Offload the VRAM of locked processes to their host memory.",
    "restore": "Reload it; the processes stay locked.",
    "unlock": "Unlock locked processes.",
    "suspend": "Lock and checkpoint.",
    "resume": "Restore and unlock.",
}
Pids = Annotated[list[int], typer.Option("--pid", metavar="PID", min=1, help="PID on the host; may be repeated.")]
Timeout = Annotated[
    int,
    typer.Option(
        "--timeout", min=0, metavar="MS", help="Time limit for each step.", show_default="the shim's own limits"
    ),
]


def register(app: typer.Typer) -> None:
    """Add the group with a command for each verb."""
    group = typer.Typer(help="Execute single steps of the CUDA driver on processes of this node.", no_args_is_help=True)
    for verb in cuda.VERBS:
        group.command(name=verb, help=HELP[verb])(_command(verb))
    group.command(help="List the GPUs of this node and what their memory holds.")(gpus)
    app.add_typer(group, name="cuda")


def _command(verb: str):  # type: ignore[no-untyped-def]  # typer reads the inner function's signature
    def command(pids: Pids, timeout: Timeout = 0, output: Output = Format.TABLE) -> None:
        done = cuda.run(verb, pids, timeout)
        if not show_document(_document(done), output, "\n".join(map(str, done.after))):
            _show(done)

    return command


def gpus(output: Output = Format.TABLE) -> None:
    found = cuda.gpus()
    documents = [
        {**asdict(gpu), "holdings": [{"pid": p, "bytes": b} for p, b in gpu.holdings.items()]} for gpu in found
    ]
    if show_document(documents, output, "\n".join(gpu.uuid for gpu in found)):
        return
    show_columns(
        ("GPU", "MODEL", "FREE", "OF", "PIDS"),
        [
            (gpu.uuid, gpu.name, size(gpu.free_bytes or 0), size(gpu.total_bytes), " ".join(map(str, gpu.holdings)))
            for gpu in found
        ],
    )


def _show(done: cuda.Done) -> None:
    rows = [(pid, before, after) for (pid, before), after in zip(done.before.items(), done.after.values(), strict=True)]
    if done.steps:
        show_columns(("PID", "BEFORE", "NOW"), rows)
        show_columns(("STEP", "TIME"), [(step.name, seconds(step.seconds)) for step in done.steps])
    else:
        show_columns(("PID", "STATE"), [(pid, now) for pid, _, now in rows])


def _document(done: cuda.Done) -> dict[str, object]:
    return {
        "processes": [{"pid": pid, "before": done.before[pid], "state": done.after[pid]} for pid in done.after],
        "steps": [{"name": step.name, "seconds": step.seconds} for step in done.steps],
    }
