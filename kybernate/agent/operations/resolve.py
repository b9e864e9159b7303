"""What a request means on this node: which container, which image, which places. Blocks; changes nothing.

Places are decided here, before the operation is journalled, and nothing may be there yet. So a whole image or archive
at its place proves afterwards that the operation has succeeded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kybernate.agent.operations.decide import DISK, GPU
from kybernate.agent.operations.errors import RequestInvalid
from kybernate.agent.operations.model import (
    Arguments,
    Checkpoint,
    Copy,
    Delete,
    Evict,
    Export,
    Import,
    Restore,
    Resume,
    Suspend,
    Swap,
    Target,
    Verify,
)
from kybernate.agent.storage.arrivals import Elsewhere
from kybernate.export.archives import manifest_in
from kybernate.node.containerd import Containerd
from kybernate.node.failure import Failure, Refused
from kybernate.node.filesystem import nearest_existing
from kybernate.node.importing import NotImported, target_of
from kybernate.node.lookup import ID_LENGTH, KnownContainer
from kybernate.node.places import PLACE_TAKEN_ADVICE, locate, new_place, open_image, short_name
from kybernate.node.restore import ID_TAKEN_ADVICE
from kybernate.node.restore_plan import RUNTIME, SNAPSHOTTER, RestoreWish, namespace_for, plan_of, trusted_spec
from kybernate.node.shim import NoTask
from kybernate.node.trusted import known_keys, ring_of, signature_of
from kybernate_shim.checkpoint.image.locate import NAME as IMAGE_NAME
from kybernate_shim.checkpoint.image.manifest import MOST_BYTES, NAME, Manifest, ManifestInvalid, Source, decode
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.config import Config
from kybernate_shim.linux.plain_files import read_plain

NAME_LENGTH = 50  # of the source's name in that of a restored container: containerd allows 76 characters in all


class ImageNotFound(Failure):
    """There is no checkpoint image at the place."""

    advice = "`kybernate images` lists what there is"


class ImagePinned(Failure):
    """The image is pinned: it is kept until the pin is taken from it."""

    advice = "take the pin from it, or delete it with --force"


@dataclass(frozen=True)
class Node:
    """What the node's other parts know, and how to reach containerd.

    `gpus_of` returns the UUIDs of the GPUs that a container, by its id, uses, as far as known. `image_of` returns the
    directory of the image that a name means here, None where the registry knows none or does not answer. `is_pinned`
    says it of an image's directory. `ref_of` returns namespace, name and id of the image, in whichever tier it is, that
    a request to move one names, and `tiers` their names. `elsewhere` returns an
    image that another node or the object store has, with True the object store; None where neither does. `pod_of`
    returns a pod, by namespace and name, as the cluster's API has it; None where the agent does not know it.
    """

    address: str
    boot: str = ""
    gpus_of: Callable[[str], Sequence[str]] = lambda id: ()
    image_of: Callable[[str], Path | None] = lambda name: None
    is_pinned: Callable[[Path], bool] = lambda path: False
    ref_of: Callable[[Copy | Evict], tuple[str, str, str]] = lambda wanted: ("", wanted.image, "")
    pod_of: Callable[[str, str], Mapping[str, Any] | None] = lambda namespace, name: None
    tiers: Callable[[], Sequence[str]] = lambda: ()
    elsewhere: Callable[[str, bool], Elsewhere | None] = lambda name, stored: None


def resolve(node: Node, id: str, arguments: Arguments) -> Target:
    """Return what the request means, for the operation `id`. Raises Failure."""
    match arguments:
        case Checkpoint():
            return _checkpoint(node, id, arguments)
        case Restore():
            return _restore(node, id, arguments)
        case Suspend() | Resume():
            return _of_containers(node, _running(node, arguments.name, arguments.namespace))
        case Swap():
            return _swap(node, arguments)
        case Verify():
            image = _image(node, arguments.image)
            return Target(image=str(image), shares=(_held(image),), copies=(_disk(image),))
        case Delete():
            return _delete(node, arguments)
        case Import():
            return _import(arguments)
        case Export():
            return _export(node, arguments)
        case Copy() | Evict():
            return _between_tiers(node, arguments)


def wish_of(arguments: Restore, id: str, operation: str = "") -> RestoreWish:
    """Return what a request wants of the new container `id`, which the operation of that name makes."""
    return RestoreWish(
        id=id,
        namespace=arguments.namespace,
        image=arguments.container_image,
        runtime=arguments.runtime or RUNTIME,
        snapshotter=arguments.snapshotter or SNAPSHOTTER,
        force=arguments.force,
        operation=operation,
    )


# ---- containers


def _running(node: Node, name: str, namespace: str) -> KnownContainer:
    with Containerd(node.address) as containerd:
        found = containerd.find(name, namespace)
    if not found.live:
        raise NoTask(f"container {found.title} has no processes: {found.state or 'it has no task'}")
    return found


def _of_containers(node: Node, *containers: KnownContainer) -> Target:
    first, last = containers[0], containers[-1]
    gpus = {gpu for container in containers for gpu in node.gpus_of(container.id)}
    return Target(
        namespace=first.namespace,
        container=first.id,
        title=first.title,
        other=last.id if len(containers) > 1 else "",
        other_title=last.title if len(containers) > 1 else "",
        holds=tuple(f"container {container.namespace}/{container.id}" for container in containers),
        copies=tuple(f"{GPU}{gpu}" for gpu in sorted(gpus)),
    )


def _swap(node: Node, arguments: Swap) -> Target:
    leaving = _running(node, arguments.leaving, arguments.namespace)
    coming = _running(node, arguments.coming, arguments.namespace)
    if leaving.id == coming.id:
        raise RequestInvalid(f"{leaving.title} cannot be swapped with itself", state="no operation was begun")
    if leaving.namespace != coming.namespace:
        raise RequestInvalid("both containers of a swap are of one namespace", state="no operation was begun")
    return _of_containers(node, leaving, coming)


def _checkpoint(node: Node, id: str, arguments: Checkpoint) -> Target:
    container = _running(node, arguments.name, arguments.namespace)
    path = arguments.path or f"{short_name(container)}-{id}"
    if "/" not in path and not IMAGE_NAME.fullmatch(path):
        raise RequestInvalid(f"{path!r} is not the name of an image", state="no operation was begun")
    place = new_place(container, _absolute(path) if "/" in path else path)
    target = _of_containers(node, container)
    return _with_place(target, image=place, writes=place)


def _restore(node: Node, id: str, arguments: Restore) -> Target:
    if arguments.log_path:
        _absolute(arguments.log_path)
    try:
        path = _image_here(node, arguments)
    except ImageNotFound:
        if (found := _elsewhere(node, arguments)) is None:
            raise
        return _restore_from_elsewhere(node, id, arguments, found)
    image = open_image(str(path), near=True)
    target = _restore_target(node, id, arguments, image.manifest.source)
    with Containerd(node.address) as containerd:
        plan_of(containerd, image, trusted_spec(image), wish_of(arguments, target.container))
    return replace(
        target,
        image=str(image.path),
        shares=(_held(image.path),),
        copies=(_disk(image.path), *(f"{GPU}{gpu.uuid}" for gpu in image.manifest.gpus)),
    )


def _image_here(node: Node, arguments: Restore) -> Path:
    """Return the directory of the image on this node, where that is wanted. Raises ImageNotFound."""
    if arguments.from_store:
        raise ImageNotFound(
            f"the object store has no image {arguments.image}",
            state="no operation was begun",
            advice="`kybernate store ls` lists what it has; `store.url` in agent.toml names the store",
        )
    return _image(node, arguments.image)


def _elsewhere(node: Node, arguments: Restore) -> Elsewhere | None:
    """Return an image that is not on this node; a path is none."""
    return None if arguments.image.startswith("/") else node.elsewhere(arguments.image, arguments.from_store)


def _restore_from_elsewhere(node: Node, id: str, arguments: Restore, found: Elsewhere) -> Target:
    """Return the target of a restore whose image arrives meanwhile: what it asks for is known when it has begun to."""
    target = _restore_target(node, id, arguments, found.source)
    ref = (found.ref.namespace, found.ref.name, found.ref.id)
    copies = tuple(f"{GPU}{uuid}" for uuid in found.gpus)
    return replace(target, image=found.ref.id, ref=ref, shares=(f"image {found.ref.id}",), copies=copies)


def _restore_target(node: Node, id: str, arguments: Restore, source: Source) -> Target:
    """Return the new container of a restore. Raises Refused."""
    name = arguments.name or f"{_source_name(source)}-{id}"
    namespace = namespace_for(source, wish_of(arguments, name))
    with Containerd(node.address) as containerd:
        if containerd.container(namespace, name) is not None:
            raise Refused(f"container {name} exists in containerd's namespace {namespace}", advice=ID_TAKEN_ADVICE)
    return Target(namespace=namespace, container=name, title=name, holds=(f"container {namespace}/{name}",))


def _source_name(source: Source) -> str:
    return source.name[:NAME_LENGTH].rstrip("._-") or source.container[:ID_LENGTH].rstrip("._-")


# ---- images


def _image(node: Node, name: str) -> Path:
    """Return the directory of an image that exists. Raises ImageNotFound and ImageAmbiguous."""
    name = _absolute(name) if name.startswith("/") else name
    path = node.image_of(name) or locate(name)
    if not os.path.lexists(path / NAME):
        raise ImageNotFound(f"no checkpoint image: {path} has no {NAME}", state="no operation was begun")
    return path


def _delete(node: Node, arguments: Delete) -> Target:
    image, config = _image(node, arguments.image), Config.load()
    roots = [root for root, _ in config.image_roots]
    if not any(image.is_relative_to(root) and image != root for root in roots):
        raise Failure(
            f"{image} lies neither below the checkpoint root nor below a trusted root",
            state="it is as it was",
            advice="remove the directory by hand",
        )
    if node.is_pinned(image) and not arguments.force:
        raise ImagePinned(f"{image} is pinned", state="it is as it was")
    return Target(image=str(image), holds=(_held(image),))


def _import(arguments: Import) -> Target:
    source, config = Path(_absolute(arguments.path)), Config.load()
    manifest, content = _foreign_manifest(source)
    inside = source.is_relative_to(config.checkpoint_root)
    known = inside or _is_signed(Image(source, manifest, content=content), config)
    claimed = manifest.source.namespace
    if claimed and not arguments.namespace and not known:
        raise NotImported(
            f"{source} says that it is an image of namespace {claimed}, and no key that is valid here has signed it",
            state="nothing was imported",
            advice=f"name the namespace whose pods may restore it: {claimed}",
        )
    name = arguments.name or ("" if source.is_dir() else source.name.removesuffix(".tar"))
    place = target_of(source, name, arguments.namespace or claimed, config)
    if place != source and os.path.lexists(place):
        raise NotImported(f"{place} exists", state="nothing was imported", advice="give another name, or remove it")
    holds = dict.fromkeys((_held(source), _held(place)))
    writes = str(place) if place != source else ""
    return Target(
        image=str(place),
        archive=str(source),
        writes=writes,
        holds=tuple(holds),
        copies=tuple(dict.fromkeys((_disk(source), _disk(place)))),
    )


def _foreign_manifest(source: Path) -> tuple[Manifest, bytes]:
    if not source.is_dir():
        return manifest_in(source)
    try:
        content = read_plain(source / NAME, most=MOST_BYTES)
        return decode(content), content
    except (OSError, ManifestInvalid, RecursionError) as error:
        raise NotImported(f"{source} is no whole checkpoint image: {error}", state="nothing was imported") from error


def _is_signed(image: Image, config: Config) -> bool:
    return signature_of(image, ring_of(known_keys(config))).key is not None


def _export(node: Node, arguments: Export) -> Target:
    image, archive = _image(node, arguments.image), Path(_absolute(arguments.path))
    if os.path.lexists(archive):
        raise Refused(f"{archive} exists", state="nothing was exported", advice=PLACE_TAKEN_ADVICE)
    if not archive.parent.is_dir():
        raise RequestInvalid(f"{archive.parent} is no directory", state="nothing was exported")
    target = Target(image=str(image), archive=str(archive), shares=(_held(image),), copies=(_disk(image),))
    return _with_place(target, writes=archive)


def _between_tiers(node: Node, arguments: Copy | Evict) -> Target:
    """Return the target of what moves an image. It takes no turn at a disk: movements have an order of their own."""
    if arguments.tier not in node.tiers():
        known = ", ".join(node.tiers())
        raise RequestInvalid(f"{arguments.tier!r} is no tier of this node: {known}", state="no operation was begun")
    namespace, name, id = ref = node.ref_of(arguments)
    return Target(image=id, title=f"{namespace}/{name}" if namespace else name, ref=ref, holds=(f"image {id}",))


# ---- places


def _with_place(target: Target, *, writes: Path, image: Path | None = None) -> Target:
    """Return the target with a place that is written."""
    return replace(
        target,
        image=str(image) if image else target.image,
        writes=str(writes),
        holds=(*target.holds, _held(writes)),
        copies=tuple(dict.fromkeys((*target.copies, _disk(writes)))),
    )


def _absolute(path: str) -> str:
    if not path.startswith("/") or ".." in Path(path).parts:
        raise RequestInvalid(f"{path!r} is no absolute path without `..`", state="no operation was begun")
    return str(Path(path))


def _held(path: Path) -> str:
    return f"path {path}"


def _disk(path: Path) -> str:
    """Return the filesystem of `path`, or where it will be."""
    device = nearest_existing(path).stat().st_dev
    return f"{DISK}{os.major(device)}:{os.minor(device)}"
