"""`kybernate up`, `down`, `models`, `restart` and `logs`: the models of one file on one machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kybernate.cli.agents import chosen
from kybernate.cli.formats import NONE, Format, Output, Table
from kybernate.cli.output import echo, printable, seconds, size
from kybernate.cli.progress import Bar
from kybernate.cli.reporting import not_installed
from kybernate.node.failure import Missing, Unavailable
from kybernate_shim.logs import LineWriter, Log, number_of

if TYPE_CHECKING:
    from kybernate.up.models_file import ModelsFile

FILE = Path("models.yaml")
AlsoFile = Annotated[
    Path | None, typer.Option("-f", "--file", metavar="FILE", help="The models, as an option.", show_default=False)
]
ModelsFileOption = Annotated[
    Path, typer.Option("--file", metavar="FILE", help="The models.", show_default="models.yaml")
]
LOG_SECONDS = 0.2  # between two looks at a log


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(up)
    app.command()(down)
    app.command()(logs)
    app.command()(models)
    app.command()(restart)


def up(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The models.", show_default="models.yaml")] = FILE,
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Keep the models in the background.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Read the file, list its models, and start nothing.")] = False,
    init: Annotated[bool, typer.Option("--init", help="Write an example to FILE.")] = False,
    pull: Annotated[bool, typer.Option("--pull", help="Pull the images of the models, and start nothing.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow the file: what changes is done.")] = False,
    source: Annotated[
        str,
        typer.Option(
            "--import",
            metavar="SOURCE",
            help="Write FILE from a configuration of llama-swap, or from `ollama`.",
            show_default=False,
        ),
    ] = "",
    schema: Annotated[bool, typer.Option("--schema", help="Print the file's JSON schema, for editors.")] = False,
    agent: Annotated[str, typer.Option(metavar="ADDRESS", help="The agent; by default the node's own.")] = "",
    also_file: AlsoFile = None,
) -> None:
    """Run the models of a file behind one address; each sleeps until it is asked."""
    file = also_file or file
    try:
        from kybernate.up import background, control, models_file  # what it loads, no other needs
        from kybernate.up import schema as schema_of

        if detach and find_spec("aiohttp") is None:  # which the process in the background loads
            raise ModuleNotFoundError(name="aiohttp")
    except ImportError as error:
        raise not_installed("`kybernate up`", error, "all") from error
    if schema:
        typer.echo(json.dumps(schema_of.schema(), indent=2))
        return
    if init:
        _write_example(file, schema_of.EXAMPLE)
        return
    agent = agent or chosen()
    if source:
        _import(source, file)
        return
    found = models_file.load(file, os.environ)
    if check:
        for entry in found.models:
            typer.echo(f"{entry.name}\t{entry.image or entry.command[0]}\tport {entry.port}")
        return
    if pull:
        _pull(found)
        return
    if (process := control.running_process(found.project)) != 0:
        os.kill(process, signal.SIGHUP)
        typer.echo(f"process {process} keeps the models of {found.project}, and reads the file again")
        return
    if detach:
        process, log_of = background.start(file, found.project, agent, watch=watch)
        typer.echo(f"process {process} keeps the models of {found.project}; its log is {log_of}")
        return
    import asyncio

    try:
        from kybernate.up import program  # takes half a second to load
    except ImportError as error:
        raise not_installed("`kybernate up`", error, "all") from error
    log = Log(LineWriter(sys.stderr.fileno()).write, number_of("warning"), {})
    asyncio.run(program.keep(file, os.environ, agent, _say, log, watch=watch))


def down(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The models.", show_default="models.yaml")] = FILE,
    keep_images: Annotated[
        bool, typer.Option("--keep-images", help="Keep the templates, from which models come back.")
    ] = False,
    agent: Annotated[str, typer.Option(metavar="ADDRESS", help="The agent; by default the node's own.")] = "",
    also_file: AlsoFile = None,
) -> None:
    """End `kybernate up` of a file, and remove its containers and templates.

    Container images stay on the node.
    """
    from kybernate.up import background, models_file, program  # what it loads, no other command needs

    project = models_file.load(also_file or file, os.environ).project
    background.end(project)
    program.down(project, _say)
    if not keep_images:
        program.remove_templates(project, agent or chosen(), _say)


def models(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The models.", show_default="models.yaml")] = FILE,
    output: Output = Format.TABLE,
    also_file: AlsoFile = None,
) -> None:
    """List the models of a file that `kybernate up` keeps."""
    from kybernate.up import control, models_file  # what it loads, no other command needs

    TABLE.show(output, control.call(models_file.load(also_file or file, os.environ).project, "models"))


def restart(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name in the file.")],
    file: ModelsFileOption = FILE,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="From the beginning, with a new template in place of the old one.")
    ] = False,
) -> None:
    """End the program of a model and start it again, from its template."""
    from kybernate.up import control, models_file  # what it loads, no other command needs

    name = control.call(models_file.load(file, os.environ).project, "restart", model=model, fresh=fresh)
    typer.echo(f"{name} is ready")


def logs(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name in the file.")],
    file: ModelsFileOption = FILE,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print what follows, until Ctrl-C.")] = False,
    tail: Annotated[
        int, typer.Option("-n", "--tail", min=0, max=10_000, metavar="LINES", help="Lines that are there already.")
    ] = 10_000,
) -> None:
    """Print the output of a model's program."""
    from kybernate.node.container_log import LogFile  # what it loads, no other command needs
    from kybernate.up import control, models_file

    found = models_file.load(file, os.environ)
    if model not in {entry.name for entry in found.models}:
        raise Missing(f"{file} has no model {model}", advice="`kybernate up --check` lists them")
    log = LogFile(control.LOGS / found.project / model / "0.log")
    lines = log.tail(tail)
    while True:
        echo(printable("".join(map(str, lines)), keep="\n\t"), end="")
        if not follow:
            break
        if not lines and log.at_end:
            time.sleep(LOG_SECONDS)
        lines = log.more()


def _row(model: dict[str, Any]) -> tuple[object, ...]:
    return (
        model["model"],
        model["state"],
        model["in_flight"],
        model["waiting"],
        seconds(model["idle_seconds"]) if model["idle_seconds"] is not None else NONE,
        size(model["vram_bytes"]) if model["vram_bytes"] else NONE,
        seconds(model["wake_seconds"]) if model["wake_seconds"] else NONE,
        "yes" if model["template"] else "no",
        model["port"],
        model["problem"] or NONE,
        model["image"] or " ".join(model["command"][:1]),
    )


HEADER = ("MODEL", "STATE", "REQUESTS", "WAITING", "IDLE", "VRAM", "LAST WAKE", "TEMPLATE", "PORT", "PROBLEM", "IMAGE")
TABLE = Table[dict[str, Any]](HEADER, _row, lambda one: one, 10, lambda one: str(one["model"]))


def _say(model: str, text: str) -> None:
    typer.echo(f"{model or 'kybernate'}: {text}", err=True)


def _write_example(file: Path, text: str) -> None:
    try:
        with file.open("x") as written:
            written.write(text)
    except FileExistsError as error:
        raise Unavailable(
            f"{file} was not written: it exists",
            state="it stays as it is",
            advice="name another file at the end of the command; `kybernate up --check` reads the one that is there",
        ) from error
    except OSError as error:
        raise Unavailable(f"{file} was not written: {error.strerror}", state="nothing was changed") from error
    typer.echo(f"wrote {file}")


def _import(source: str, file: Path) -> None:
    """Write a file of models from another program's, and say what was not carried over."""
    from kybernate.up import importing, models_file, ollama  # what they load, no other command needs

    if source == "ollama":
        programs = {"llama_server": shutil.which("llama-server") or "", "ollama": shutil.which("ollama") or ""}
        found = ollama.from_ollama(os.environ, **programs)
    else:
        found = importing.from_llama_swap(Path(source), os.environ)
    text = found.text(source)
    _write_example(file, text)
    for one in found.lost:
        typer.echo(f"not carried over: {one}", err=True)
    models_file.load(file, os.environ)


def _pull(file: ModelsFile) -> None:
    """Pull the images of all models that the node does not have."""
    from kybernate.up.pods import Pods

    with Pods(file.project) as pods:
        for entry in file.models:
            if pods.has_image(entry):
                typer.echo(f"{entry.name}: {entry.image or 'a program of the host'} is here")
                continue
            with Bar(f"pull {entry.image}") as bar:
                pods.pull(entry, bar.count)
            typer.echo(f"{entry.name}: {entry.image or 'the empty image'} was pulled")
