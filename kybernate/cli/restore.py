"""`kybernate restore`: make a container from a checkpoint image, and let it go on where it was."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kybernate.cli.options import ADDRESS, Address, ImageName, Json
from kybernate.cli.output import show_fields, show_json
from kybernate.cli.places import open_image
from kybernate.cli.privileges import summary
from kybernate.cli.progress import Bar
from kybernate.cli.reporting import Interrupted
from kybernate.node import restore as restoring
from kybernate.node.audited import image_ref, note
from kybernate.node.containerd import Containerd
from kybernate.node.failure import Failure
from kybernate.node.lookup import Container
from kybernate.node.shim import shim_of, watching
from kybernate.node.spec import RESTORE_FROM, for_restore, with_requester
from kybernate.node.stdio import Stdio, attached, into_log
from kybernate.node.trusted import ImageUntrusted, require_named, require_trusted
from kybernate_shim.checkpoint.image import Image
from kybernate_shim.config import DEFAULT_PATH, Config

RUNTIME = "io.containerd.kybernate.v1"
SNAPSHOTTER = "overlayfs"
STDOUT, STDERR = 1, 2  # the descriptors: a container writes bytes, whatever they are


class ImageDiffers(Failure):
    """The container image on this node is not the one that the container was made from."""

    advice = "pull the image by its digest and name it with --image, or go on regardless with --force"


class ImageUnknown(Failure):
    """The checkpoint does not say which container image it needs."""

    advice = "name it with --image"


class AnnotationOff(Failure):
    """The node's configuration keeps the shim from reading the annotation that names the image."""

    advice = "allow it: without the annotation, the shim would start the container from nothing"


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
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Leave it in the background.")] = False,
    log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --detach, append its output to a file.", show_default="discarded"),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Go on where only a risk speaks against it.", show_default=False)
    ] = False,
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
    as_json: Json = False,
) -> None:
    """Make a container from a checkpoint image.

    In the foreground its output is shown, Ctrl-C is passed on, and it is removed when it has ended. In Kubernetes,
    restore with a pod that carries the annotation kybernate.io/restore-from.
    """
    if (log or as_json) and not detach:
        raise typer.BadParameter("it goes with --detach only", param_hint="--log" if log else "--json")
    found = open_image(checkpoint)
    saved = _trusted_spec(found)
    with Containerd(address) as containerd:
        plan = _plan(containerd, found, saved, name, image, runtime, snapshotter, namespace, force=force)
        terminal = bool((plan.spec.get("process") or {}).get("terminal"))
        if not detach:
            raise typer.Exit(_foreground(containerd, plan, terminal=terminal))
        container, pid = _restored(containerd, plan, into_log(log, terminal=terminal))
    if as_json:
        show_json({"namespace": container.namespace, "container": container.id, "pid": pid, "path": str(found.path)})
    else:
        show_fields({"container": container.id, "pid": pid})


def _trusted_spec(image: Image) -> dict[str, Any]:
    """Return the saved spec of an image that may be restored. Raises ImageUntrusted, with what the image asks for."""
    config = Config.load()
    if not config.pod_may_use(RESTORE_FROM):
        raise AnnotationOff(
            f"`annotations` in {DEFAULT_PATH} does not allow {RESTORE_FROM}", state="nothing was created"
        )
    try:
        require_trusted(image, config)
        spec = with_requester(restoring.saved_spec(image, config.encryption_key), image.manifest.source)
        require_named(image, spec, config)
    except ImageUntrusted as error:
        note("restore", "refused", image_ref(image.path, image.manifest, image.digest), config, reason=str(error))
        if words := summary(image):
            error.args = (f"{error}\n{words}",)
        raise
    return spec


def _plan(
    containerd: Containerd,
    checkpoint: Image,
    saved: Mapping[str, Any],
    name: str,
    image: str,
    runtime: str,
    snapshotter: str,
    namespace: str,
    *,
    force: bool,
) -> restoring.Plan:
    source = checkpoint.manifest.source
    namespace = namespace or ("k8s.io" if source.pod else "default")
    reference = image or source.image
    if not reference:
        raise ImageUnknown(f"{checkpoint.path} does not say which container image its container was made from")
    if not image and not force:
        _same_image(containerd, namespace, reference, source.image_digest)
    id = name or source.container
    spec = for_restore(saved, namespace=namespace, id=id, image=checkpoint.path)
    if force:
        spec["annotations"]["kybernate.io/force"] = "true"
    return restoring.Plan(namespace, id, checkpoint.path, spec, reference, runtime, snapshotter)


def _same_image(containerd: Containerd, namespace: str, reference: str, digest: str) -> None:
    found = restoring.image_digest(containerd, namespace, reference)
    if digest and found and found != digest:
        raise ImageDiffers(
            f"{reference} is {found} on this node, but the container was made from {digest}",
            state="nothing was created",
        )


def _restored(containerd: Containerd, plan: restoring.Plan, stdio: Stdio) -> tuple[Container, int]:
    """Create the container and let it run; return it with the pid of its first process."""
    try:
        with Bar(f"restore {plan.id}") as bar, restoring.prepared(containerd, plan, stdio) as prepared:
            return prepared.container, asyncio.run(_start(prepared, containerd.address, bar))
    except KeyboardInterrupt:
        raise Interrupted("interrupted", state=f"container {plan.id} was removed again") from None


async def _start(prepared: restoring.Prepared, address: str, bar: Bar) -> int:
    """Start the task once it is sure that its shim is ours: another one would start the container from nothing."""
    container = prepared.container
    async with shim_of(container, address) as shim:
        await shim.status(container.id)
        async with watching(shim, container.id, bar.show):
            return await asyncio.to_thread(prepared.start)


def _foreground(containerd: Containerd, plan: restoring.Plan, *, terminal: bool) -> int:
    """Run the container to its end, show its output, remove it, and return its exit status."""
    with attached(STDOUT, STDERR, terminal=terminal) as stdio:
        container, _ = _restored(containerd, plan, stdio)
        try:
            with _passing_on(containerd, container), ThreadPoolExecutor(1) as waiting:
                return waiting.submit(restoring.wait, containerd, container).result()
        finally:
            restoring.remove(containerd, container)


@contextmanager
def _passing_on(containerd: Containerd, container: Container) -> Iterator[None]:
    """Give the container the signals that would end us; it decides what they mean.

    The handlers call containerd, so the main thread must not be inside of gRPC when they run.
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
