"""`kybernate up`, `down` and `logs`: the models of one file on one machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from kybernate.cli.output import echo, printable
from kybernate.cli.reporting import not_installed
from kybernate.node.failure import Missing, Unavailable
from kybernate_shim.logs import LineWriter, Log, number_of

FILE = Path("models.yaml")
START_SECONDS = 20.0
STOP_SECONDS = 30.0
LOG_SECONDS = 0.2  # between two looks at a log


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(up)
    app.command()(down)
    app.command()(logs)


def up(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The models.", show_default="models.yaml")] = FILE,
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Keep the models in the background.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Read the file, list its models, and start nothing.")] = False,
    init: Annotated[bool, typer.Option("--init", help="Write an example to FILE.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the file's JSON schema, for editors.")] = False,
    agent: Annotated[str, typer.Option(metavar="ADDRESS", help="The agent; by default the node's own.")] = "",
) -> None:
    """Run the models of a file behind one address; each sleeps until it is asked."""
    try:
        from kybernate.up import models_file, program  # what it loads, no other command needs
    except ImportError as error:
        raise not_installed("`kybernate up`", error, "all") from error
    if schema:
        typer.echo(json.dumps(models_file.schema(), indent=2))
        return
    if init:
        _write_example(file, models_file.EXAMPLE)
        return
    found = models_file.load(file, os.environ)
    if check:
        for entry in found.models:
            typer.echo(f"{entry.name}\t{entry.image or entry.command[0]}\tport {entry.port}")
        return
    if (process := program.running_process(found.project)) != 0:
        os.kill(process, signal.SIGHUP)
        typer.echo(f"process {process} keeps the models of {found.project}, and reads the file again")
        return
    if detach:
        _detach(file, found.project, agent)
        return
    import asyncio

    log = Log(LineWriter(sys.stderr.fileno()).write, number_of("warning"), {})
    asyncio.run(program.keep(file, os.environ, agent, _say, log))


def down(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The models.", show_default="models.yaml")] = FILE,
) -> None:
    """End `kybernate up` of a file, and remove its containers. Images and templates stay."""
    from kybernate.up import models_file, program  # what it loads, no other command needs

    project = models_file.load(file, os.environ).project
    if process := program.running_process(project):
        os.kill(process, signal.SIGTERM)
        end = time.monotonic() + STOP_SECONDS
        while program.running_process(project) == process and time.monotonic() < end:
            time.sleep(0.05)
    program.down(project, _say)


def logs(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name in the file.")],
    file: Annotated[
        Path, typer.Option("--file", metavar="FILE", help="The models.", show_default="models.yaml")
    ] = FILE,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print what follows, until Ctrl-C.")] = False,
    tail: Annotated[
        int, typer.Option("-n", "--tail", min=0, max=10_000, metavar="LINES", help="Lines that are there already.")
    ] = 10_000,
) -> None:
    """Print the output of a model's program."""
    from kybernate.node.container_log import LogFile  # what it loads, no other command needs
    from kybernate.up import models_file, pods

    found = models_file.load(file, os.environ)
    if model not in {entry.name for entry in found.models}:
        raise Missing(f"{file} has no model {model}", advice="`kybernate up --check` lists them")
    log = LogFile(pods.LOGS / found.project / model / "0.log")
    lines = log.tail(tail)
    while lines or follow:
        echo(printable("".join(map(str, lines)), keep="\n\t"), end="")
        if not lines:
            time.sleep(LOG_SECONDS)
        lines = log.more()


def _say(model: str, text: str) -> None:
    typer.echo(f"{model or 'kybernate'}: {text}", err=True)


def _write_example(file: Path, text: str) -> None:
    try:
        with file.open("x") as written:
            written.write(text)
    except OSError as error:
        raise Unavailable(f"{file} was not written: {error.strerror}", state="nothing was changed") from error
    typer.echo(f"wrote {file}")


def _detach(file: Path, project: str, agent: str) -> None:
    """Start this command in the background, as a unit of systemd where that runs."""
    from kybernate.up import pods, program

    command = [sys.executable, "-c", "from kybernate.cli import main; main()", "up", str(file.resolve())]
    command += ["--agent", agent] * bool(agent)
    log = pods.LOGS / project / "up.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if Path("/run/systemd/system").exists():
        unit = ["systemd-run", f"--unit=kybernate-up-{project}", "--collect", "--property=Restart=always"]
        started = subprocess.run([*unit, *command], check=False, capture_output=True, text=True)
        if started.returncode != 0:
            raise Unavailable(f"systemd-run: {started.stderr.strip()}")
    else:
        with log.open("ab") as output:
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd="/"
            )
    end = time.monotonic() + START_SECONDS
    while not (process := program.running_process(project)):
        if time.monotonic() > end:
            raise Unavailable(f"no process keeps the models after {START_SECONDS:.0f} s", advice=f"look at {log}")
        time.sleep(0.05)
    typer.echo(f"process {process} keeps the models of {project}; its log is {log}")
