"""From a Create request to a container object: what it is made of is read and decided here, nothing is started yet."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate_shim.checkpoint.claim import FILE_NAME, claim_config
from kybernate_shim.checkpoint.requested import requested_image
from kybernate_shim.config import Config
from kybernate_shim.cuda.nccl_safe import NCCL_SAFE, NCCL_SAFE_ANNOTATION
from kybernate_shim.linux.children import Children
from kybernate_shim.logs import Log
from kybernate_shim.messages import task_pb2 as wire
from kybernate_shim.oci.bundle import Bundle, Remains
from kybernate_shim.oci.gpu_spec import set_environment
from kybernate_shim.oci.options import RuntimeOptions, decode_options, effective_config
from kybernate_shim.oci.preload_spec import DESTINATION, LIBRARY, add_library, wants_library
from kybernate_shim.oci.runtime import Runtime, runtime_environment
from kybernate_shim.oci.select import choose_runtime, resolve_cli
from kybernate_shim.oci.spec import Spec, edit_spec
from kybernate_shim.task.container import Container, Publish
from kybernate_shim.task.stdio import StdioConfig

if TYPE_CHECKING:
    from kybernate_shim.checkpoint.image import Image


def prepare(
    request: wire.CreateTaskRequest,
    *,
    namespace: str,
    config: Config,
    children: Children,
    publish: Publish,
    log: Log,
) -> Container:
    """Decide runtime, options and settings of the container in `request`, and note them in its bundle for `delete`.

    `config` is the node's; the container's own options are laid over it. Raises UnsupportedOptions, ConfigInvalid,
    SpecInvalid, RuntimeMissing, CheckpointNotFound, CheckpointInvalid, and OSError when the bundle's disk is full.
    """
    bundle = Bundle(Path(request.bundle))
    # The runtime remembers the annotation of CRIU's configuration from now on; the file comes with a checkpoint.
    spec = edit_spec(bundle.path, partial(claim_config, path=bundle.path / FILE_NAME))
    options = decode_options(request.options if request.HasField("options") else None)
    config = effective_config(config, options)
    if config.pods_choice(spec.annotations, NCCL_SAFE_ANNOTATION) == "true":
        spec = edit_spec(bundle.path, partial(set_environment, variables=NCCL_SAFE))
    for warning in config.warnings:
        log.warning("config.ignored", task=request.id, error=warning)
    image = _image(request, options, spec, config)
    if wants_library(spec, config) or (image is not None and _had_library(image)):
        if LIBRARY.exists():
            spec = edit_spec(bundle.path, add_library)
        else:
            log.warning("arena.unavailable", task=request.id, error=f"{LIBRARY} was not built: `make native` builds it")
    if image is not None:
        from kybernate_shim.checkpoint import criu_images, loopback

        if loopback.is_own(spec.document) and criu_images.has_internet_sockets(image.path):
            spec = edit_spec(bundle.path, loopback.add_hook)
    return Container(
        request.id,
        namespace=namespace,
        bundle=bundle,
        spec=spec,
        options=options,
        config=config,
        runtime=_runtime(bundle, spec, options, config, namespace, children),
        children=children,
        publish=publish,
        log=log,
        stdio=StdioConfig(request.stdin, request.stdout, request.stderr, request.terminal),
        image=image,
    )


def _had_library(image: Image) -> bool:
    """Tell whether the image's processes have the preload library mapped, and so need its file to be there."""
    return any(mount.destination == DESTINATION for mount in image.manifest.mounts)


def _image(request: wire.CreateTaskRequest, options: RuntimeOptions, spec: Spec, config: Config) -> Image | None:
    """Return the checkpoint image to start from, None for a plain start. Raises CheckpointNotFound, CheckpointInvalid.

    `request.checkpoint` is a directory that containerd has just unpacked from its content store, which takes nothing in
    whose SHA-256 is not its name; to digest it once more would only make people wait. With `criu_image_path` it repeats
    that path, where anybody may have written.
    """
    path = request.checkpoint or options.criu_image_path or requested_image(spec, config)
    if not path:
        return None
    from kybernate_shim.checkpoint.image import read_image  # most containers start from none

    return replace(read_image(Path(path)), checked=bool(request.checkpoint) and not options.criu_image_path)


def _runtime(
    bundle: Bundle, spec: Spec, options: RuntimeOptions, config: Config, namespace: str, children: Children
) -> Runtime:
    binary = choose_runtime(os.environ, options, config, spec)
    cli = resolve_cli(binary, namespace=namespace, log=bundle.log, options=options, config=config, spec=spec)
    bundle.write_runtime(binary, options, root=cli.root.parent, systemd_cgroup=cli.systemd_cgroup)
    bundle.write_remains(Remains(str(binary), str(cli.root), cli.systemd_cgroup, phase="create"))
    return Runtime(cli, children, runtime_environment(os.environ, config.criu), config.deadlines)
