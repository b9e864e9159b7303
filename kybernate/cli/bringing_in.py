"""What an import of a directory, of an archive and of an image registry share: show the image, ask, sign, place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from kybernate.cli.asking import require_agreement
from kybernate.cli.output import INDENT, show_columns, show_fields, size
from kybernate.cli.privileges import documented, mount_rows, show_processes
from kybernate.cli.progress import Bar
from kybernate.cli.reporting import Interrupted
from kybernate.cli.told import tell_agent
from kybernate.node.failure import Failure, Invalid, Refused
from kybernate.node.importing import IMAGE_NOT_WHOLE_ADVICE, Examined, Imported, admit, examine, target_of
from kybernate.node.privileges import SpecPrivileges, privileges_of, requests_of
from kybernate.node.trusted import Signed, known_keys, ring_of, signature_of
from kybernate_shim.checkpoint.image.manifest import Manifest
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.config import Config
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.requester import requester_of

NOTHING = "nothing was imported"


@dataclass(frozen=True)
class Wanted:
    """What an import is to do: the image's new name, and the namespace, "" for the one in the image.

    `origin` is where it comes from, in words. `known`: the image was here before, so its namespace is believed.
    """

    name: str
    namespace: str
    origin: str
    yes: bool
    move: bool
    known: bool = False


def bring_in(source: Path, wanted: Wanted, config: Config, *, quiet: bool) -> dict[str, Any]:
    """Examine the image in `source`, show it with its origin, ask, import it, and return what is there now.

    Nothing is shown if `quiet`, and so nothing can be asked. Raises what a user is shown.
    """
    if quiet and not wanted.yes:
        raise Refused("this needs a confirmation", state=NOTHING, advice="use --yes, or another output")
    examined = _examined(source, wanted.origin)
    asks = _asks(examined)
    chosen = _namespace(examined, wanted, config)
    target = target_of(source, wanted.name, chosen, config)
    if not quiet:
        _show(examined, wanted.origin, asks, target, chosen, config)
    require_agreement("\nImport this image, and trust it from now on?", yes=wanted.yes, state=NOTHING)
    done = _admitted(examined, target, chosen, config, wanted)
    if done.unaudited:
        typer.echo(f"kybernate: the import is not in the audit log: {done.unaudited}", err=True)
    tell_agent(target, *([source] if wanted.move else []))
    if not quiet:
        typer.echo(f"\nimported {target}, signed by key {done.manifest.signature.key}")
    return _document(wanted.origin, examined, asks, target, done.manifest)


def _examined(source: Path, origin: str) -> Examined:
    try:
        with Bar(f"examine {origin}") as bar:
            return examine(source, bar.count)
    except KeyboardInterrupt:
        raise Interrupted("interrupted", state=NOTHING) from None


def _asks(examined: Examined) -> SpecPrivileges:
    try:
        return privileges_of(examined.spec, examined.manifest)
    except Invalid as error:
        raise Failure(f"{examined.directory}: {error}", state=NOTHING, advice=IMAGE_NOT_WHOLE_ADVICE) from error


def _admitted(examined: Examined, target: Path, namespace: str, config: Config, wanted: Wanted) -> Imported:
    move, origin = wanted.move, wanted.origin
    try:
        with Bar(f"import {target}") as bar:
            return admit(examined, target, namespace, config, move=move, progress=bar.count, origin=origin)
    except KeyboardInterrupt:
        raise Interrupted("interrupted", state=NOTHING) from None


def _namespace(examined: Examined, wanted: Wanted, config: Config) -> str:
    """Return the namespace for the image. What a foreign image claims is only taken where a person sees it."""
    if wanted.namespace:
        return wanted.namespace
    claimed = examined.manifest.source.namespace or requester_of(Spec(examined.spec)).namespace
    known = wanted.known or _signed(examined, config).key is not None
    if claimed and wanted.yes and not known:
        raise Failure(
            f"{wanted.origin} is an image of namespace {claimed} by its manifest, which no key that is valid here"
            " has signed",
            state=NOTHING,
            advice=f"name the namespace whose pods may restore it: --namespace {claimed}",
        )
    return claimed


def _signed(examined: Examined, config: Config) -> Signed:
    image = Image(examined.directory, examined.manifest, content=examined.content)
    return signature_of(image, ring_of(known_keys(config)))


def _show(examined: Examined, origin: str, asks: SpecPrivileges, target: Path, namespace: str, config: Config) -> None:
    manifest, source = examined.manifest, examined.manifest.source
    pod = "/".join(word for word in (source.namespace, source.pod, source.name) if word) if source.pod else ""
    signed = _signed(examined, config)
    show_fields(
        {
            "image": origin,
            "made": f"{manifest.time}{f' on {source.node}' if source.node else ''}",
            "container": source.container,
            "pod": pod,
            "container image": source.image,
            "size": f"{size(manifest.bytes)} in {len(manifest.files)} files, all as in the manifest",
            "signed by": signed if signed.key else signed.reason,
            "goes to": target,
            "for": f"pods of namespace {namespace}, and root" if namespace else "root only (`kybernate restore`)",
        }
    )
    _section("processes", ("PID", "NAME", "MEMORY"), [(p.pid, p.name, size(p.rss_bytes)) for p in manifest.processes])
    show_processes(manifest)
    _show_privileges(asks, known=bool(examined.spec))
    _section("GPUs", ("UUID", "MODEL"), [(gpu.uuid, gpu.model) for gpu in manifest.gpus])


def _show_privileges(asks: SpecPrivileges, *, known: bool) -> None:
    if known:
        _section("privileges", ("PRIVILEGE", "VALUE"), list(requests_of(asks).items()))
    else:
        typer.echo("\nprivileges: unknown, the image does not hold the configuration of its container")
    hooks = [(one,) for one in asks.hooks]
    _section("hooks, programs of the node that would run as root", ("STAGE AND PROGRAM",), hooks)
    _section("mounts of the node", ("DESTINATION", "SOURCE", "ACCESS", "LISTED AS"), mount_rows(asks.mounts))


def _section(title: str, header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    if rows:
        typer.echo(f"\n{title}:")
        show_columns(header, rows, indent=INDENT)


def _document(
    origin: str, examined: Examined, asks: SpecPrivileges, target: Path, manifest: Manifest
) -> dict[str, Any]:
    return {
        "path": str(target),
        "source": origin,
        "namespace": manifest.source.namespace,
        "key": manifest.signature.key,
        "bytes": manifest.bytes,
        "privileges": documented(asks) if examined.spec else None,
    }
