"""`kybernate restore`: make a container from a checkpoint image, which resumes where it stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kybernate.cli.agents import agent_or_none, finished, is_remote, named_here, require_here, require_wait, seconds_of
from kybernate.cli.directly import carried_out
from kybernate.cli.ended import steps_of
from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.moved import as_documents
from kybernate.cli.options import ADDRESS, Address, ImageName, Wait
from kybernate.cli.output import seconds as duration
from kybernate.cli.output import show_columns, show_fields, size
from kybernate.cli.progress import Bar
from kybernate.cli.store import Url, store_place, store_transfer
from kybernate.cli.through_agent import begun
from kybernate.messages import agent_pb2 as wire
from kybernate.node import restore as restoring
from kybernate.node.containerd import Containerd
from kybernate.node.lookup import KnownContainer
from kybernate.node.places import locate
from kybernate.node.restore_plan import RUNTIME, SNAPSHOTTER
from kybernate.node.stdio import TaskStreams, attached
from kybernate.verbs.restore import Restore
from kybernate_shim.checkpoint.image.manifest import NAME as MANIFEST

STDOUT, STDERR = 1, 2  # the descriptors: a container writes bytes, whatever they are
LOOK_SECONDS = 0.2  # between two looks at whether a container has ended, or a signal has come


class Source(StrEnum):
    """Where the image is."""

    NODE = "node"
    STORE = "store"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(restore)


def restore(
    checkpoint: ImageName,
    name: Annotated[
        str, typer.Option("--name", metavar="ID", help="Id of the new container.", show_default="the old one's")
    ] = "",
    image: Annotated[
        str,
        typer.Option("--image", metavar="REF", help="Container image for its files.", show_default="the old one's"),
    ] = "",
    runtime: Annotated[str, typer.Option(metavar="NAME", help="containerd's name of the runtime.")] = RUNTIME,
    snapshotter: Annotated[
        str, typer.Option(metavar="NAME", help="containerd's snapshotter.", envvar="CONTAINERD_SNAPSHOTTER")
    ] = SNAPSHOTTER,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Run it in the background.")] = False,
    log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --detach, append its output to a file.", show_default="discarded"),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Continue if only a risk was found.", show_default=False)
    ] = False,
    source: Annotated[
        Source, typer.Option("--from", metavar="node|store", help="Where the image is: on this node, or in the store.")
    ] = Source.NODE,
    url: Url = "",
    wait: Wait = True,
    namespace: Annotated[
        str,
        typer.Option(
            "--namespace",
            "-n",
            metavar="NAME",
            help="containerd's namespace for it.",
            show_default="k8s.io for pods, else default",
        ),
    ] = "",
    address: Address = ADDRESS,
    output: Output = Format.TABLE,
) -> None:
    """Create a container from a checkpoint image.

    In the foreground, the command prints the output of the container, passes Ctrl-C on, and removes the container when
    it ends. In Kubernetes, restore with a pod that has the annotation kybernate.io/restore-from. With --from store,
    CRIU starts when its own files have arrived, the VRAM follows in parallel, and nothing is written to a disk.
    """
    if (log or output != Format.TABLE) and not detach:
        raise typer.BadParameter("it needs --detach", param_hint="--log" if log else "--output")
    if not detach or url:
        require_here("without --detach, or with --url, the command itself restores")
    with agent_or_none(address) as agent:
        # in the foreground, the container's streams are this command's, and an agent has one store
        if agent is not None and detach and not url:
            operation = agent.restore(
                _named(checkpoint, source),
                name=name,
                namespace=namespace,
                container_image=image,
                runtime=runtime,
                snapshotter=snapshotter,
                log_path=str(log.absolute()) if log else "",
                force=force,
                from_store=source is Source.STORE,
            )
            return _show_restored(finished(operation), source, output=output) if wait else begun(operation)
    require_wait(wait)
    with ExitStack() as arrival, ExitStack() as attachment:
        verb = Restore(
            str(arrival.enter_context(_arriving(checkpoint, url))) if source is Source.STORE else checkpoint,
            name,
            namespace,
            image,
            runtime,
            snapshotter,
            log_path=str(log.absolute()) if log else "",
            force=force,
        )
        if detach:
            return _show_restored(carried_out(verb, address), source, output=output)
        done = carried_out(verb, address, streams=lambda terminal: attachment.enter_context(_attached(terminal)))
        raise typer.Exit(_to_its_end(done, address, arrival))


def _named(checkpoint: str, source: Source) -> str:
    """Return what an agent knows an image by: one that is here by its directory. Raises Ambiguous."""
    if source is not Source.NODE or is_remote():
        return checkpoint
    place = locate(checkpoint)
    return str(place) if os.path.lexists(place / MANIFEST) else named_here(checkpoint)


@contextmanager
def _arriving(name: str, url: str) -> Iterator[Path]:
    """Yield an image of the store as soon as its restore may begin; the rest arrives while the block lasts."""
    place = store_place(url)
    from kybernate.store.named import named_recipe
    from kybernate.store.streaming.arriving import arriving_in_memory

    with Bar(f"bring {name}") as bar:
        arrival = arriving_in_memory(place, lambda store: named_recipe(store, name), store_transfer(bar))
        arriving = arrival.__enter__()
    with ExitStack() as stack:
        stack.push(arrival)
        yield arriving.directory


def _show_restored(done: wire.Operation, source: Source, *, output: Format) -> None:
    tier, steps = done.result.source, steps_of(done)
    took = seconds_of(done) if tier else 0.0  # a shim that has ended with its container names neither
    document = {
        "namespace": done.namespace,
        "container": done.container,
        "pid": done.result.pid,
        "path": done.image if source is Source.NODE else Path(done.image).name,
        "source": tier,
        "seconds": took,
        "steps": as_documents(steps),
    }
    if show_document(document, output, done.container):
        return
    show_fields(
        {
            "container": done.container,
            "pid": done.result.pid,
            "from": tier,
            "time": duration(took) if tier else "",
        }
    )
    rows = [(step.name, duration(step.seconds), size(step.bytes) if step.bytes else "") for step in steps]
    if rows:
        typer.echo()
        show_columns(("STEP", "TIME", "SIZE"), rows)


def _attached(terminal: bool) -> AbstractContextManager[TaskStreams]:
    return attached(STDOUT, STDERR, terminal=terminal)


def _to_its_end(restored: wire.Operation, address: str, arrival: ExitStack) -> int:
    """Wait for the container's end, remove it, and return its exit status. Its image is not needed any more."""
    with Containerd(address) as containerd:
        container = containerd.find(restored.container, restored.namespace)
        try:
            arrival.close()
            with _passing_on(containerd, container), ThreadPoolExecutor(1) as waiting:
                return _signalled_result(waiting.submit(restoring.wait, containerd, container))
        finally:
            restoring.remove(containerd, container)


def _signalled_result(future: Future[int]) -> int:
    """Wait for a thread, and let handlers of signals run meanwhile.

    A signal that arrives just before a thread blocks does not wake it, so the wait is one of many short ones.
    """
    while not futures.wait([future], timeout=LOOK_SECONDS).done:
        continue
    return future.result()


@contextmanager
def _passing_on(containerd: Containerd, container: KnownContainer) -> Iterator[None]:
    """Give the container the signals that would end us; it decides what they mean.

    The handlers call containerd, so the main thread must not be inside gRPC when they run.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {
        number: signal.signal(number, lambda number, _: restoring.kill(containerd, container, number))
        for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
