"""`kybernate inspect`: what is in a checkpoint image, what a restore of it needs, and whether it is whole."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kybernate.cli.completion import an_image
from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.output import INDENT, seconds, show_columns, show_fields, size
from kybernate.cli.privileges import show_processes
from kybernate.cli.progress import Bar
from kybernate.node.failure import Failure, Refused
from kybernate.node.places import locate, open_image, unfound, unusable
from kybernate.node.trusted import known_keys, ring_of, signature_of
from kybernate.node.verdict import SIGNATURE, problems_with
from kybernate_shim import errors
from kybernate_shim.checkpoint.image.codec import to_json
from kybernate_shim.checkpoint.image.encrypted import memory_bytes
from kybernate_shim.checkpoint.image.manifest import Manifest, UsedGpu
from kybernate_shim.checkpoint.image.store import CheckpointInvalid, CheckpointNotFound, Image, Problem
from kybernate_shim.config import Config

DENIED = os.strerror(errno.EACCES)
INSIDE = ("pseudo", "private", "hook")  # mounts that a restore makes by itself, or its hooks do


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(inspect)


def inspect(
    image: Annotated[
        str,
        typer.Argument(
            metavar="IMAGE",
            help="Name of a checkpoint image, as `kybernate images` lists it, [NAMESPACE/]NAME; its directory; or an"
            " archive of the kubelet's, of `crictl`, or of an export.",
            show_default=False,
            autocompletion=an_image,
        ),
    ],
    check: Annotated[
        bool, typer.Option("--verify", help="Compare every file with its digest, and prove that it can be restored.")
    ] = False,
    output: Output = Format.TABLE,
) -> None:
    """Show what is in a checkpoint image.

    Processes, memory, files, GPUs and versions, and what a restore needs. With --verify, the exit status is 1 when a
    file is missing or changed, when no key that is valid here has signed the manifest as it is, or when a restore would
    not find what a process has open; the problems are listed.
    """
    place = locate(image)
    if os.path.isfile(place):  # noqa: PTH113  # no word is too long for it
        from kybernate.cli.pull import unpacked  # few images come as one file
        from kybernate.export.documents import ArtefactInvalid

        try:
            with unpacked(place, Config.load()) as found:
                _inspect(str(found.path), place, check=check, output=output)
        except ArtefactInvalid as error:
            raise Failure(f"{place} is not an archive of an image: {error}", advice=error.advice) from error
    else:
        _inspect(image, place, check=check, output=output)


def _inspect(image: str, place: Path, *, check: bool, output: Format) -> None:
    """Show an image; `place` is where it is for the user."""
    problems = _verified(image) if check else None
    if problems:
        _show_problems(place, problems, output=output)
        raise typer.Exit(1)
    found = replace(open_image(image), path=place)
    if show_document(_document(found, problems), output, str(found.path)):
        return
    _show(found)
    if check:
        typer.echo(f"\nverified: {len(found.manifest.files)} files are unchanged, and the signature is valid here")


def _verified(name: str) -> list[Problem]:
    try:
        with Bar(f"verify {name}") as bar:
            return problems_with(locate(name), Config.load(), bar.count)
    except CheckpointNotFound as error:
        raise unfound(name, error) from error
    except CheckpointInvalid as error:
        raise unusable(error) from error
    except errors.Refused as error:
        raise Failure(f"cannot verify: {error}", state="without --verify, no key is needed") from error


def _show_problems(path: Path, problems: list[Problem], *, output: Format) -> None:
    document = {"path": str(path), "verified": False, "problems": _listed(problems)}
    if show_document(document, output, str(path)):
        return
    show_columns(("FILE", "PROBLEM", ""), [(problem.file, problem.kind, problem.detail) for problem in problems])
    typer.echo(f"kybernate: {path} {_verdict(problems)}", err=True)


def _verdict(problems: list[Problem]) -> str:
    """Say the worst of what was found."""
    files = [problem for problem in problems if problem.kind != SIGNATURE]
    if files and all(problem.kind == "unreadable" and DENIED in problem.detail for problem in files):
        return f"cannot be verified: this user may not read {len(files)} of its files; run as root"
    many = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
    if all(problem.kind == SIGNATURE for problem in problems):
        return f"is not trusted and cannot be restored: {problems[0].detail}"
    return f"is damaged and cannot be restored: {many}"


def _listed(problems: list[Problem]) -> list[dict[str, str]]:
    return [{"file": problem.file, "kind": problem.kind, "detail": problem.detail} for problem in problems]


def _document(image: Image, problems: list[Problem] | None) -> dict[str, Any]:
    """Return the manifest and what follows from it; `verified` is null where nothing was verified."""
    manifest = image.manifest
    return {
        "path": str(image.path),
        "bytes": manifest.bytes,
        "memory_bytes": memory(manifest),
        "vram_bytes": vram(manifest),
        "verified": None if problems is None else not problems,
        "problems": [],
        "signature": _signature(image),
        "manifest": to_json(manifest),
    }


def _signature(image: Image) -> dict[str, Any]:
    """Return the key that the manifest names, and whether its signature is valid on this node."""
    try:
        signed = signature_of(image, ring_of(known_keys(Config.load())))
    except Refused as error:
        return {"key": image.manifest.signature.key, "valid": False, "problem": f"not checked: {error}"}
    return {"key": signed.id, "valid": signed.key is not None, "problem": signed.reason}


def _signer(image: Image) -> str:
    """Say who has signed the image."""
    try:
        keys = known_keys(Config.load())
    except Refused as error:
        return f"not checked: {error}"
    signed = signature_of(image, ring_of(keys))
    if signed.fault == "unsigned":
        return "not signed"
    kinds = [file.kind for file in keys if file.key is not None and signed.key is not None and file.key.id == signed.id]
    return f"key {signed.id} ({kinds[0]} key), valid here" if kinds else signed.reason


def memory(manifest: Manifest) -> int:
    """Return what the processes held in host memory, VRAM aside."""
    return sum(process.rss_bytes for process in manifest.processes)


def vram(manifest: Manifest) -> int:
    """Return what they held on all GPUs."""
    held = sum(process.bytes for process in manifest.cuda_processes)
    return held or sum(map(_held, manifest.gpus))


def _held(gpu: UsedGpu) -> int:
    return sum(process.bytes for process in gpu.processes)


def _told(held: int) -> str:
    return size(held) if held else "unknown"


def _show(image: Image) -> None:
    manifest = image.manifest
    show_fields(_summary(image))
    _section("processes", ("PID", "NAME", "MEMORY"), [(p.pid, p.name, size(p.rss_bytes)) for p in manifest.processes])
    show_processes(manifest)
    _section("processes with CUDA state", ("PID", "VRAM"), [(p.pid, _told(p.bytes)) for p in manifest.cuda_processes])
    _section(
        "processes without CUDA state that released inherited GPU device files",
        ("PID", "NAME", "MAPPINGS", "DESCRIPTORS", "MADE PRIVATE"),
        [(p.pid, p.name, p.mappings, p.descriptors, size(p.kept_bytes)) for p in manifest.released],
    )
    _section("GPUs", ("UUID", "MODEL", "VRAM"), [(gpu.uuid, gpu.model, _told(_held(gpu))) for gpu in manifest.gpus])
    used = {gpu.uuid for gpu in manifest.gpus}
    _section(
        "GPUs of the container",
        ("UUID", ""),
        [(uuid, "used" if uuid in used else "") for uuid in manifest.visible_gpus],
    )
    _section(
        "mounts",
        ("DESTINATION", "TYPE", "KIND", "SOURCE"),
        [(mount.destination, mount.type, mount.kind, mount.source) for mount in manifest.mounts],
    )
    _section(
        "volumes of the pod, with their content",
        ("NAME", "KIND", "DESTINATION", "FILES", "SIZE"),
        [(v.name, v.kind, ", ".join(v.destinations), v.entries, size(v.bytes)) for v in manifest.volumes],
    )
    _section("steps", ("STEP", "TIME", "SIZE"), [_step(s.name, s.seconds, s.bytes) for s in manifest.steps])
    files = sorted(manifest.files, key=lambda file: -file.size)
    _section("files", ("FILE", "SIZE"), [(file.name, size(file.size)) for file in files])
    typer.echo("\na restore needs:")
    for need in needs(manifest):
        typer.echo(f"{INDENT}{need}")


def _step(name: str, time: float, moved: int) -> tuple[str, str, str]:
    return name, seconds(time), size(moved) if moved else ""


def _section(title: str, header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    if rows:
        typer.echo(f"\n{title}:")
        show_columns(header, rows, indent=INDENT)


def _summary(image: Image) -> dict[str, object]:
    manifest, source = image.manifest, image.manifest.source
    pod = "/".join(word for word in (source.namespace, source.pod, source.name) if word) if source.pod else ""
    return {
        "checkpoint": manifest.id,
        "path": image.path,
        "made": f"{manifest.time}{f' on {source.node}' if source.node else ''}",
        "container": source.container,
        "pod": pod,
        "comes from": f"{manifest.lineage.parent}, of the lineage of {manifest.origin}"
        if manifest.lineage.parent
        else "",
        "image": source.image,
        "digest": source.image_digest,
        "signature": _signer(image),
        "size": f"{size(manifest.bytes)} in {len(manifest.files)} files",
        "encrypted": f"key {manifest.encryption.key_id}, {manifest.encryption.algorithm}"
        if manifest.encryption
        else "",
        "memory": size(memory(manifest)),
        "VRAM": _told(vram(manifest)) if manifest.has_gpu_state else "",
        "VRAM bytes": _way(manifest) if manifest.has_gpu_state else "",
        "frozen": seconds(manifest.frozen_ms / 1000) if manifest.frozen_ms else "",
        "changed files": "included" if manifest.rootfs_diff else "not included",
        "connections": {"close": "closed", "established": "kept"}[manifest.tcp],
        "runtime": f"{manifest.runtime.name} {manifest.runtime.version}",
        "criu": manifest.criu.version,
        "kernel": f"{manifest.host.kernel} {manifest.host.architecture}",
    }


def _way(manifest: Manifest) -> str:
    """Say where the bytes are that a restore moves back into VRAM."""
    if manifest.data_path.name == "fast" or manifest.arena:
        return f"in {len(manifest.moved_files)} files of their own"
    return f"in CRIU's files ({manifest.data_path.why})"


def needs(manifest: Manifest) -> list[str]:
    """Return what must be there before the image can be restored, one sentence each."""
    host, source = manifest.host, manifest.source
    wanted = [
        f"an {host.architecture} machine with the CPU features of the old one, kernel {host.kernel} or newer",
        f"CRIU {manifest.criu.version} or newer, cgroup v{host.cgroup_version}",
    ]
    if source.image:
        wanted.append(f"container image {source.image}")
    wanted.append(f"{size(memory(manifest) + vram(manifest))} of memory while it is restored")
    wanted += [
        f"a {gpu.model} with {size(_held(gpu)) if _held(gpu) else 'enough'} of free VRAM, driver {gpu.driver}"
        for gpu in manifest.gpus
    ]
    if manifest.encryption:
        wanted.append(
            f"key {manifest.encryption.key_id} (`encryption_key`), and {size(memory_bytes(manifest.files))} of memory"
            " more, for the decrypted files"
        )
    if manifest.arena:
        wanted.append(f"{size(manifest.arena_bytes)} free in the node's arena (`gpu.arena`)")
    if (count := len(manifest.visible_gpus)) > 1:
        wanted.append(f"{count} GPUs, used or not: the driver requires a target for each")
    outside = [mount.destination for mount in manifest.mounts if mount.kind not in INSIDE]
    if outside:
        wanted.append(f"mounts at {', '.join(outside)}")
    if manifest.tcp == "established":
        wanted.append("the network addresses of the old container, for the connections that it keeps")
    return wanted
