"""What is found of containerd: process, program, files of its configuration, socket, loaded handlers and shims.

Sources: containerd's docs/cri/config.md and docs/PLUGINS.md; `containerd config dump` of 1.7 to 2.4; containerd's
pkg/shim and core/runtime/v2 for where a shim is looked for.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from kybernate import addresses
from kybernate.messages import cri_status_pb2 as cri
from kybernate.node.containerd import Containerd, ContainerdRefused, ContainerdUnreachable
from kybernate.node.containerd_process import (
    DEFAULT_CONFIGURATION,
    ContainerdProcess,
    find_process,
    imported_files,
    is_awaited,
)
from kybernate.node.finding import ask_program
from kybernate.node.room import Room, room_of
from kybernate_shim import bounded_json

TESTED: Final = ((1, 7), (2, 4))  # the oldest and the newest
CRI_CHECKPOINTS, CRI_RESTORES = (2, 0), ((2, 1), (2, 3))  # which releases' CRI does
HANDLER: Final = "kybernate"
SHIM: Final = "containerd-shim-kybernate-v1"
OUR_TYPE: Final = "io.containerd.kybernate.v1"
ONE_PLUGIN, SPLIT = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"  # of version 2, and of 3 and newer
SPLIT_CRI: Final = 3  # the first version of a configuration that has two plugins, which 2.x does not have to migrate
ANSWER_SECONDS: Final = 5.0
MOST_CONFIGURATION: Final = 1 << 20  # bytes of a file
SETUP: Final = "`kybernate setup containerd` configures it"
CLOCK_SECONDS: Final = 2.0  # between the kernel's clock for files and the one for the starts of processes
STATUS_METHOD: Final = "/runtime.v1.RuntimeService/Status"
OTHERS: Final = 0o007

Answer = Literal["answers", "no socket", "no permission", "nothing listens", "silent", "refused"]


@dataclass(frozen=True)
class ConfigurationFile:
    """A file of the configuration. `form` is its version; `problem` says why it cannot be read."""

    path: Path
    changed: float = 0.0  # seconds since 1970
    form: int = 0
    plugins: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Shim:
    """The program of a handler: `path` is "" where there is none; `version` is "" where it does not run."""

    handler: str
    wanted: str
    path: str = ""
    version: str = ""
    words: str = ""


@dataclass(frozen=True)
class ContainerdFacts:
    """What was found. `program` is "" where no containerd is installed; `dumped` is its configuration as it reads it.

    `loaded`: the handlers of the process that runs, None where CRI does not answer; `cri` says why not, or what CRI
    itself reports to be unready. `words` are of the program or the socket that failed.
    """

    program: str = ""
    version: str = ""
    version_words: str = ""
    running: ContainerdProcess | None = None
    awaited: bool = False
    address: str = addresses.CONTAINERD
    answer: Answer = "answers"
    words: str = ""
    mode: int = 0o660
    files: tuple[ConfigurationFile, ...] = ()
    dumped: Mapping[str, Any] | None = None
    dump_words: str = ""
    loaded: tuple[str, ...] | None = None
    cri: tuple[str, ...] = ()
    shims: tuple[Shim, ...] = ()
    rooms: tuple[Room, ...] = field(default=())


def handlers(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the runtimes of CRI, by the handlers' names, of a configuration or of what containerd makes of it."""
    for name in (SPLIT, ONE_PLUGIN):
        if found := _handlers_of(document, name):
            return found
    return {}


def _handlers_of(document: Mapping[str, Any], plugin: str) -> Mapping[str, Any]:
    at: Any = document
    for key in ("plugins", plugin, "containerd", "runtimes"):
        at = at.get(key, {}) if isinstance(at, Mapping) else {}
    return at if isinstance(at, Mapping) else {}


def is_ours(runtime: Any) -> bool:
    """Return whether a handler's table runs our shim."""
    if not isinstance(runtime, Mapping):
        return False
    named = str(runtime.get("runtime_type", "")) == OUR_TYPE
    return named or Path(str(runtime.get("runtime_path", ""))).name == SHIM


def gather(address: str = addresses.CONTAINERD) -> ContainerdFacts:
    """Look at processes, programs, files and sockets; every call has a deadline."""
    running = find_process()
    program = (running.program if running else "") or shutil.which("containerd") or ""
    if not program:
        return ContainerdFacts()
    _, words = ask_program(program, "--version")
    version = words.split()[2] if len(words.split()) > 2 else ""
    main = running.configuration if running else DEFAULT_CONFIGURATION
    dumped, dump_words = _dumped(program, main)
    answer, said = _answer(address)
    loaded, unready = _loaded(address) if answer == "answers" else (None, ())
    return ContainerdFacts(
        program,
        version,
        words,
        running,
        running is not None and is_awaited(running),
        address,
        answer,
        said,
        _mode(address),
        tuple(_files(main)),
        dumped,
        dump_words,
        loaded,
        unready,
        tuple(_shims(dumped or {}, running, program)),
        tuple(_rooms(dumped or {})),
    )


def _dumped(program: str, main: Path) -> tuple[Mapping[str, Any] | None, str]:
    status, words = ask_program(program, "--config", str(main), "config", "dump", warnings=False)
    if status:
        return None, words.rpartition("\n")[2] or f"`{program} config dump` ended with {status}"
    try:
        return tomllib.loads(words), ""
    except tomllib.TOMLDecodeError as error:
        return None, f"`{program} config dump` prints invalid TOML: {error}"


def _files(main: Path) -> Iterator[ConfigurationFile]:
    """Yield the main file, where there is one, and those that it imports."""
    if not main.exists():
        return
    one, document = _file(main)
    yield one
    imports = document.get("imports", [])
    try:
        for path in imported_files(main, [str(one) for one in imports] if isinstance(imports, list) else []):
            yield _file(path)[0]
    except OSError as error:
        yield ConfigurationFile(main, problem=f"its imports cannot be read: {error}")


def _file(path: Path) -> tuple[ConfigurationFile, Mapping[str, Any]]:
    try:
        changed = path.stat().st_mtime
        with path.open("rb") as file:
            document = tomllib.loads(file.read(MOST_CONFIGURATION).decode())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return ConfigurationFile(path, problem=str(reason)), {}
    form = document.get("version", 1)
    plugins = tuple(f"{name} handlers" for name in (ONE_PLUGIN, SPLIT) if _handlers_of(document, name))
    return ConfigurationFile(path, changed, form if isinstance(form, int) else 0, plugins), document


def _mode(address: str) -> int:
    try:
        return stat.S_IMODE(Path(address).stat().st_mode)
    except OSError:
        return 0


def _answer(address: str) -> tuple[Answer, str]:
    """Return what containerd's socket does with a connection and a call."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        try:
            connection.connect(address)
        except FileNotFoundError:
            return "no socket", ""
        except PermissionError:
            return "no permission", ""
        except (ConnectionRefusedError, NotADirectoryError):
            return "nothing listens", ""
        except OSError as error:
            return "refused" if error.errno not in (errno.EAGAIN, errno.ETIMEDOUT) else "silent", str(error)
    try:
        with Containerd(address) as containerd:
            containerd.call(_version_of(containerd), _empty(), timeout=ANSWER_SECONDS)
    except ContainerdUnreachable as error:
        return "refused", str(error)
    except ContainerdRefused as error:
        return ("silent", "") if error.code == "DEADLINE_EXCEEDED" else ("refused", str(error))
    return "answers", ""


def _version_of(containerd: Containerd) -> Any:
    from kybernate.messages import version_pb2_grpc

    return version_pb2_grpc.VersionStub(containerd.channel).Version


def _empty() -> Any:
    from google.protobuf import empty_pb2

    return empty_pb2.Empty()


def _loaded(address: str) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Return the handlers of the process that runs, and what CRI reports to be unready or why it does not answer."""
    try:
        with Containerd(address) as containerd:
            ask = containerd.channel.unary_unary(
                STATUS_METHOD,
                request_serializer=cri.StatusRequest.SerializeToString,
                response_deserializer=cri.StatusResponse.FromString,
            )
            status = containerd.call(ask, cri.StatusRequest(verbose=True), timeout=ANSWER_SECONDS)
    except (ContainerdUnreachable, ContainerdRefused) as error:
        return None, (f"does not answer: {error}",)
    unready = tuple(f"{one.type}: {one.message or one.reason}" for one in status.status.conditions if not one.status)
    return tuple(sorted(_names(status))), unready


def _names(status: cri.StatusResponse) -> set[str]:
    """Return the handlers that CRI names: by its answer from 2.0 on, by its settings before."""
    if named := {one.name for one in status.runtime_handlers if one.name}:
        return named
    try:
        config = bounded_json.parse(status.info.get("config", "{}").encode())
    except ValueError:
        return set()
    table: Any = config.get("containerd", {}) if isinstance(config, Mapping) else {}
    runtimes = table.get("runtimes", {}) if isinstance(table, Mapping) else {}
    return set(map(str, runtimes)) if isinstance(runtimes, Mapping) else set()


def _shims(dumped: Mapping[str, Any], running: ContainerdProcess | None, program: str) -> Iterator[Shim]:
    """Yield the programs of our handlers, each program once."""
    search = (running.path if running else "") or os.environ.get("PATH", os.defpath)
    seen: set[str] = set()
    for name, runtime in handlers(dumped).items():
        if not is_ours(runtime):
            continue
        wanted = str(runtime.get("runtime_path") or "")
        found = wanted if os.access(wanted, os.X_OK) else ""
        if not wanted:
            found = shutil.which(SHIM, path=os.pathsep.join([search, str(Path(program).parent)])) or ""
            wanted = found or f"/usr/local/bin/{SHIM}"
        if wanted in seen:
            continue
        seen.add(wanted)
        words = ask_program(found, "-v")[1] if found else ""
        version = re.search(r"Version:\s*(\S+)", words)
        yield Shim(name, wanted, found, version[1] if version else "", words.partition("\n")[0])


def _rooms(dumped: Mapping[str, Any]) -> Iterator[Room]:
    for key, default in (("root", "/var/lib/containerd"), ("state", "/run/containerd")):
        yield room_of(f"containerd's {key}", Path(str(dumped.get(key) or default)))
