"""containerd and the OCI runtimes of this node: their versions, and what containerd's configuration makes of them.

Sources: containerd's docs/cri/config.md and RELEASES.md; `containerd config dump` of 1.7 to 2.4.
"""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kybernate.node.finding import HealthFinding, Verdict, ask_program
from kybernate_shim.checkpoint.criu.config import parse_version
from kybernate_shim.config import Config
from kybernate_shim.imports import DRIVER
from kybernate_shim.oci.select import DIRECTORIES, GPU_RUNTIME

CONTAINERD, RUNC = ((1, 7), (2, 4)), ((1, 1), (1, 5))  # the oldest and the newest that are tested
CRI_CHECKPOINTS, CRI_RESTORES = (2, 0), ((2, 1), (2, 3))  # which releases' CRI does
CONFIGURATION = Path("/etc/containerd/config.toml")
SPLIT_CRI = 3  # the first version of a configuration that 2.x does not have to migrate
SHIM = "containerd-shim-kybernate-v1"
ONE_PLUGIN, SPLIT = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"  # of version 2, and of 3 and newer


def runtimes(config: Config) -> Iterator[HealthFinding]:
    """Report on containerd, on the handlers that pods can name, and on the OCI runtimes."""
    yield from _containerd()
    for name in ("runc", "crun"):
        if program := shutil.which(name):
            status, words = ask_program(program, "--version")
            first = words.splitlines()[0] if words else program
            yield HealthFinding(name, "bad", first) if status else _tested(name, first)
        elif name == "runc":
            yield HealthFinding(name, "bad", "not in PATH", "install runc, or name another by `runtime`")
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *map(str, DIRECTORIES[GPU_RUNTIME])])
    if program := shutil.which(GPU_RUNTIME, path=path):
        yield HealthFinding(GPU_RUNTIME, "ok", program)
    elif DRIVER.exists():
        yield HealthFinding(
            GPU_RUNTIME, "note", "missing", "containers that request GPUs need it; install NVIDIA's toolkit"
        )


def _tested(name: str, found: str) -> HealthFinding:
    """Compare a version with those that are tested. One of crun's is as good as another."""
    tested = {"containerd": CONTAINERD, "runc": RUNC}.get(name)
    version = next(filter(None, map(parse_version, found.split())), ())[:2]
    if tested is None or not version or tested[0] <= version <= tested[1]:
        return HealthFinding(name, "ok", found)
    oldest, newest = (".".join(map(str, one)) for one in tested)
    if version < tested[0]:
        return HealthFinding(name, "bad", found, f"install {oldest} or newer")
    return HealthFinding(name, "note", found, f"{newest} is the newest release that Kybernate was tested with")


def _containerd() -> Iterator[HealthFinding]:
    program = shutil.which("containerd")
    if program is None:
        yield HealthFinding("containerd", "note", "not in PATH")
        return
    status, words = ask_program(program, "--version")
    version = parse_version(words.split()[2])[:2] if len(words.split()) > 2 else ()
    if status or not version:
        yield HealthFinding("containerd", "bad", words or "does not run", "install containerd 1.7 or newer")
        return
    yield _tested("containerd", f"{words.split()[2]}: {_through_cri(version)}")
    yield from _configuration(program, version)


def _through_cri(version: tuple[int, ...]) -> str:
    """Say what containerd's CRI, and so the kubelet and `crictl`, can do with checkpoints."""
    if version < CRI_CHECKPOINTS:
        return "CRI has no checkpoints"
    if CRI_RESTORES[0] <= version <= CRI_RESTORES[1]:
        return "CRI writes checkpoints and restores them"
    return "CRI writes checkpoints, pods restore by annotation"


def _configuration(program: str, version: tuple[int, ...]) -> Iterator[HealthFinding]:
    """Report the form of containerd's configuration, and the handlers in it that run our shim."""
    subject = "containerd's configuration"
    status, words = ask_program(program, "config", "dump", warnings=False)
    try:
        dumped = tomllib.loads(words)
        written = int(tomllib.loads(CONFIGURATION.read_text()).get("version", 1)) if CONFIGURATION.exists() else 0
    except (tomllib.TOMLDecodeError, OSError, ValueError) as error:
        status, words = 1, words if status else str(error)
    if status:
        yield HealthFinding(subject, "note", words.splitlines()[-1], "`containerd config dump` shows what is wrong")
        return
    ours = [name for name, runtime in handlers(dumped).items() if _is_ours(runtime)]
    form = f"version {written}" if written else "none, containerd's defaults"
    found = f"{form}; handlers of Kybernate: {', '.join(ours) or 'none'}"
    verdict: Verdict = "ok"
    advice = ""
    if not ours:
        verdict, advice = "note", "pods need one, see packaging/containerd; `ctr run --runtime` works without"
    elif version >= (2, 0) and 0 < written < SPLIT_CRI:
        advice = "run `containerd config migrate` before a drop-in file is added, or settings of CRI are lost"
        verdict = "note"
    yield HealthFinding(subject, verdict, found, advice)


def handlers(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the runtimes of CRI, by the handlers' names, of a configuration or of what containerd makes of it."""
    for name in (SPLIT, ONE_PLUGIN):
        at: Any = document
        for key in ("plugins", name, "containerd", "runtimes"):
            at = at.get(key, {}) if isinstance(at, Mapping) else {}
        if isinstance(at, Mapping) and at:
            return at
    return {}


def _is_ours(runtime: Mapping[str, Any]) -> bool:
    named = str(runtime.get("runtime_type", "")).startswith("io.containerd.kybernate.")
    return named or Path(str(runtime.get("runtime_path", ""))).name == SHIM
