"""`kybernate store`: checkpoint images in an object store, as chunks that all of them share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kybernate.agent.peering import target_of_node
from kybernate.agent.settings import DEFAULT_PATH as AGENT_TOML
from kybernate.agent.settings import Settings
from kybernate.cli.formats import NONE, Format, Output, Table, rfc3339, show_document
from kybernate.cli.options import ImageName
from kybernate.cli.output import age, printable, show_columns, show_fields, size
from kybernate.cli.progress import Bar
from kybernate.cli.reporting import Interrupted, not_installed
from kybernate.cli.simulating import simulate
from kybernate.cli.told import tell_agent
from kybernate.node.failure import Refused
from kybernate.node.places import PLACE_TAKEN_ADVICE, open_image
from kybernate.node.trusted import known_keys, ring_of
from kybernate.node.verdict import manifest_fault
from kybernate_shim.config import Config

if TYPE_CHECKING:  # libraries of the extra `store`
    from kybernate.store.chunkstore import ChunkStore
    from kybernate.store.format.recipe import Recipe
    from kybernate.store.gc import Collected
    from kybernate.store.place import StorePlace
    from kybernate.store.transfer import Transfer

T = TypeVar("T")
HEADER = ("NAME", "NAMESPACE", "SIZE", "CREATED", "CHUNKS", "ID")
NARROW = 4

Url = Annotated[
    str,
    typer.Option(
        "--url", metavar="URL", help="The store: s3://BUCKET/PREFIX, gs://…, az://… or file:///DIRECTORY.",
        show_default="store.url of agent.toml",
    ),
]  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Keep checkpoint images in an object store.", no_args_is_help=True)
    for command in (init, put, get, ls, rm, check, gc, stats, simulate):
        group.command()(command)
    app.add_typer(group, name="store")


def init(url: Url = "", output: Output = Format.TABLE) -> None:
    """Turn a place into a store, with a new key if the node has none.

    All nodes that share the store need the same key file (`store.key`): copy it in a safe way. The command
    reports what the service lacks.
    """
    place = store_place(url)
    from kybernate.store.keys import make_key
    from kybernate.store.probe import probe

    if not place.key.exists():
        make_key(place.key)

    async def work(store: ChunkStore) -> tuple[str, list[str]]:
        return store.id, await probe(store.objects)

    id, service = run_in_store(place, work, create=True)
    known = {"url": place.url, "id": id, "key": str(place.key), "encrypted": place.encrypted}
    if show_document({**known, "service": service}, output, place.url):
        return
    show_fields({"store": place.url, "id": id, "key": place.key, "encrypted": "yes" if place.encrypted else "no"})
    _warn(f"{place.url}: {words}" for words in service)


def put(image: ImageName, url: Url = "", output: Output = Format.TABLE) -> None:
    """Store an image of this node.

    Only chunks that the store does not have are sent. An interrupted transfer continues where it stopped.
    """
    from kybernate.store import images

    directory = open_image(image).path
    with Bar(f"store {directory.name}") as bar:
        transfer = store_transfer(bar)
        recipe = run_in_store(store_place(url), lambda store: images.put(store, directory, transfer))
    progress = transfer.progress
    document = {"id": recipe.id, "namespace": recipe.namespace, "name": recipe.name, **asdict(progress)}
    if show_document(document, output, recipe.id):
        return
    show_fields(
        {
            "image": recipe.name,
            "id": recipe.id,
            "size": size(recipe.size),
            "sent": size(progress.sent_bytes),
            "known": size(progress.known_bytes),
            "zeros": size(progress.zero_bytes),
        }
    )


def get(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="Name or id, or [NAMESPACE/]NAME.", show_default=False)],
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="Directory that is created.", show_default="its usual place")
    ] = None,
    while_restoring: Annotated[
        bool, typer.Option("--while-restoring", help="Let restores begin as soon as CRIU's files are there.")
    ] = False,
    url: Url = "",
    node: Annotated[
        str,
        typer.Option("--from-node", metavar="NODE", help="Read it from the agent of another node.", show_default=False),
    ] = "",
    output: Output = Format.TABLE,
) -> None:
    """Bring an image back to this node, from the store or from another node that has it.

    Every byte is compared with its digest. The directory appears when it is complete. With --while-restoring it
    appears immediately, and restores of it wait for what is missing.
    """
    if node:
        return _get_from_node(node, image, path, output=output)
    from kybernate.store import images
    from kybernate.store.named import named_recipe
    from kybernate.store.streaming.arriving import arriving_at

    def target(recipe: Recipe) -> Path:
        return path.absolute() if path else Config.load().checkpoint_root / recipe.namespace / recipe.name

    async def work(store: ChunkStore) -> tuple[Recipe, Path]:
        recipe = await named_recipe(store, image)
        return recipe, await images.get(store, recipe, target(recipe), transfer)

    with Bar(f"bring back {image}") as bar, _free_place():
        transfer = store_transfer(bar)
        if while_restoring:
            with arriving_at(store_place(url), lambda store: named_recipe(store, image), transfer, target) as arriving:
                arriving.wait()
            recipe, directory = arriving.recipe, arriving.directory
        else:
            recipe, directory = run_in_store(store_place(url), work)
    _show_got(recipe.id, str(directory), recipe.size, transfer, output=output)
    return None


def _get_from_node(node: str, image: str, path: Path | None, *, output: Format) -> None:
    from kybernate.store.tiers.directory import DirectoryTier
    from kybernate.store.tiers.peer import PeerTier
    from kybernate.store.tiers.tier import Held

    config = Config.load()
    tier = PeerTier(node, target_of_node(node, Settings.load()), config)

    async def work() -> Held:
        source = await tier.open_named(image)
        try:
            if path is None:
                return await DirectoryTier("disk", 2, config.checkpoint_root).receive(source, transfer)
            source.ref = replace(source.ref, namespace="", name=path.absolute().name)
            return await DirectoryTier("disk", 2, path.absolute().parent).receive(source, transfer)
        finally:
            await source.close()

    with Bar(f"bring {image} from {node}") as bar:
        transfer = store_transfer(bar)
        try:
            held = asyncio.run(work())
        except KeyboardInterrupt:
            raise Interrupted(
                "interrupted", state="what has arrived stays on this node", advice="the same command continues there"
            ) from None
    _show_got(held.ref.id, held.place, held.bytes, transfer, output=output)


def _show_got(id: str, place: str, bytes: int, transfer: Transfer, *, output: Format) -> None:
    tell_agent(Path(place))
    if not show_document({"id": id, "path": place, **asdict(transfer.progress)}, output, place):
        show_fields({"image": place, "size": size(bytes), "read": size(transfer.progress.sent_bytes)})


def ls(
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", metavar="NS", help="Kubernetes namespace.", show_default="all of them")
    ] = "",
    url: Url = "",
    output: Output = Format.TABLE,
) -> None:
    """List the images in the store."""

    broken: dict[str, str] = {}

    async def work(store: ChunkStore) -> list[Recipe]:
        return [recipe async for recipe in store.recipes(namespace, broken=broken.__setitem__)]

    found = sorted(run_in_store(store_place(url), work), key=lambda one: -one.created)
    TABLE.show(output, found)
    _warn(f"{name} cannot be read: {why}" for name, why in sorted(broken.items()))


def rm(
    images: Annotated[list[str], typer.Argument(metavar="IMAGE...", help="Names or ids.", show_default=False)],
    url: Url = "",
) -> None:
    """Remove images from the store. `kybernate store gc` frees their space.

    images/NAMESPACE/ID, as other commands print for what they cannot read, removes exactly that object.
    """
    from kybernate.store.named import named_object

    async def work(store: ChunkStore) -> list[str]:
        found = dict([await named_object(store, image) for image in images])
        await store.objects.delete(list(found))
        return list(found.values())

    for name in run_in_store(store_place(url), work):
        typer.echo(f"removed {name}")


def check(
    read: Annotated[bool, typer.Option("--read", help="Read every chunk and compare it with its digest.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Index the packs that no index lists.")] = False,
    url: Url = "",
    output: Output = Format.TABLE,
) -> None:
    """Compare the indexes of the store with its content.

    The exit code is 1 where anything is damaged.
    """
    from kybernate.store.check import check as look

    with Bar("check", counted=True) as bar:
        ring = ring_of(known_keys(Config.load()))
        found = run_in_store(
            store_place(url),
            lambda store: look(
                store,
                read=read,
                repair=repair,
                report=bar.count,
                fault_of=lambda recipe: manifest_fault(recipe.manifest, ring),
            ),
        )
    if not show_document({**asdict(found), "verdict": found.verdict}, output, "\n".join(found.damaged)):
        show_fields(
            {"images": found.images, "packs": f"{found.packs}, {size(found.pack_bytes)}", "chunks": found.chunks}
        )
        _warn([*(f"of the service: {words}" for words in found.service), *found.problems])
        if found.damaged:
            show_columns(("DAMAGED", "REASON"), found.damaged.items())
        typer.echo(found.verdict)
    if found.is_bad:
        raise typer.Exit(1)


def gc(
    grace: Annotated[
        float, typer.Option(min=0, metavar="HOURS", help="Keep packs younger than this, and noted packs for this time.")
    ] = 24,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing.")] = False,
    url: Url = "",
    output: Output = Format.TABLE,
) -> None:
    """Delete chunks that no image needs.

    A run notes packs; a later one deletes those that were noted at least --grace before. It is safe while others write.
    Where anything of an image is missing, nothing is noted or deleted, and the exit status is 1.
    """
    from kybernate.store.gc import collect

    place = store_place(url)
    with Bar("collect", counted=True) as bar:
        found = run_in_store(place, lambda store: collect(store, grace=grace * 3600, dry_run=dry_run, report=bar.count))
    if not show_document(asdict(found), output, place.url):
        _show_collected(found)
    if found.problems:
        _warn([*found.problems, "nothing was deleted: `kybernate store check` lists what is damaged"])
        raise typer.Exit(1)


def _show_collected(found: Collected) -> None:
    show_fields(
        {
            "images": found.images,
            "chunks": found.chunks,
            "deleted": f"{found.deleted_packs} packs, {size(found.deleted_bytes)}",
            "noted": f"{found.condemned_packs} packs, {size(found.condemned_bytes)}",
            "rescued": f"{found.rescued_chunks} chunks of noted packs" if found.rescued_chunks else "",
            "missing": f"{found.missing_chunks} chunks: see `kybernate store check`" if found.missing_chunks else "",
            "unreadable": f"{found.unread_packs} packs: see `kybernate store check`" if found.unread_packs else "",
        }
    )


def stats(url: Url = "", output: Output = Format.TABLE) -> None:
    """Show the size of the store, and what sharing chunks saves."""
    from kybernate.store.stats import stats as count

    place = store_place(url)
    with Bar("stats", counted=True) as bar:
        found = run_in_store(place, lambda store: count(store, report=bar.count))
    if show_document(asdict(found), output, place.url):
        return
    part = f", {found.stored_bytes / found.image_bytes:.0%} of them" if found.image_bytes else ""
    show_fields(
        {
            "images": f"{found.images}, {size(found.image_bytes)}",
            "stored": f"{size(found.stored_bytes)}{part}",
            "packs": found.packs,
            "chunks": found.chunks,
        }
    )
    _warn(f"{name} cannot be read: {why}" for name, why in sorted(found.broken.items()))


def _warn(sentences: Iterable[str]) -> None:
    for words in sentences:
        typer.echo(f"kybernate: {printable(words)}", err=True)


@contextmanager
def _free_place() -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        raise Refused(str(error), state="nothing was changed", advice=PLACE_TAKEN_ADVICE) from None


def store_place(url: str) -> StorePlace:
    try:
        import obstore  # noqa: F401
        import zstandard  # noqa: F401

        from kybernate.store.place import StorePlace
    except ModuleNotFoundError as error:
        raise not_installed("the store", error, "store") from error
    from kybernate.store.errors import StoreInvalid

    wanted = Settings.load().store
    if not (url or wanted.url):
        raise StoreInvalid("no store is configured", advice=f"set `store.url` in {AGENT_TOML}, or use --url")
    return StorePlace(url or wanted.url, wanted.key, wanted.encrypted, wanted.endpoint, wanted.region, wanted.ca)


def store_transfer(bar: Bar) -> Transfer:
    from kybernate.store.transfer import Transfer

    wanted = Settings.load().store
    return Transfer(
        parallel=wanted.parallel,
        level=wanted.compression,
        bytes_per_second=wanted.bytes_per_second,
        report=lambda progress: bar.count(progress.done_bytes, progress.total_bytes),
    )


def run_in_store(place: StorePlace, work: Callable[[ChunkStore], Coroutine[Any, Any, T]], *, create: bool = False) -> T:
    from kybernate.store.errors import first_of
    from kybernate.store.place import open_store

    async def opened() -> T:
        store = await open_store(place).open(create=create)
        try:
            return await work(store)
        finally:
            store.close()

    try:
        return asyncio.run(opened())
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted", state="what was sent stays in the store", advice="the same command continues there"
        ) from None
    except ExceptionGroup as group:
        raise first_of(group) from group


def _document(one: Recipe) -> dict[str, object]:
    return {
        "id": one.id,
        "namespace": one.namespace,
        "name": one.name,
        "bytes": one.size,
        "created": rfc3339(one.created),
    }


def _row(one: Recipe) -> tuple[object, ...]:
    return (
        one.name,
        one.namespace or NONE,
        size(one.size),
        age(time.time() - one.created),
        len(one.chunks()),
        one.id,
    )


TABLE = Table(HEADER, _row, _document, NARROW, lambda one: str(one.id))
