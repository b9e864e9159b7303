"""containerd as a user of Kybernate needs it: it runs, answers, and has loaded a handler that starts our shim.

`gather` asks process, program, files and sockets; `findings` is a pure function of what it returns, with one remedy a
finding. Sources: containerd's docs/cri/config.md and docs/PLUGINS.md; `containerd config dump` of 1.7 to 2.4;
containerd's pkg/shim and core/runtime/v2 for where a shim is looked for.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import stat
import sys
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
from kybernate.node.finding import HealthFinding, Verdict, ask_program, compared
from kybernate.node.room import Room, room_of
from kybernate.node.room import findings as room_findings
from kybernate_shim import __version__, bounded_json
from kybernate_shim.checkpoint.criu.config import parse_version

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


# ---- what it means


def findings(facts: ContainerdFacts) -> Iterator[HealthFinding]:
    """Yield what is found of containerd, its configuration, the handlers and the shim."""
    if not facts.program:
        yield HealthFinding("containerd", "note", "not installed", "install containerd 1.7 or newer")
        return
    release = parse_version(facts.version)[:2]
    if not release:
        yield HealthFinding(
            "containerd", "bad", facts.version_words or "does not run", "install containerd 1.7 or newer"
        )
        return
    yield compared("containerd", f"{facts.version}: {_through_cri(release)}", facts.version, TESTED)
    yield _process(facts)
    yield from _socket(facts)
    yield from _configuration(facts, release)
    yield from _handlers(facts)
    yield from _cri(facts)
    yield from map(_shim, facts.shims)
    yield from room_findings(facts.rooms)


def _through_cri(version: tuple[int, ...]) -> str:
    """Say what containerd's CRI, and so the kubelet and `crictl`, can do with checkpoints."""
    if version < CRI_CHECKPOINTS:
        return "CRI has no checkpoints"
    if CRI_RESTORES[0] <= version <= CRI_RESTORES[1]:
        return "CRI writes checkpoints and restores them"
    return "CRI writes checkpoints, pods restore by annotation"


def _process(facts: ContainerdFacts) -> HealthFinding:
    subject, running = "containerd's process", facts.running
    if running is None:
        advice = "`systemctl start containerd` starts it, `journalctl -u containerd` shows why it ended"
        return HealthFinding(subject, "bad", "does not run", advice)
    if running.halted:
        found = f"process {running.pid} is stopped by a signal or a debugger"
        return HealthFinding(subject, "bad", found, f"`kill -CONT {running.pid}` continues it")
    return HealthFinding(subject, "ok", f"{running.pid}, {running.unit or 'no service of systemd'}")


def _socket(facts: ContainerdFacts) -> Iterator[HealthFinding]:
    subject = "containerd's socket"
    if facts.running is None or (facts.running.halted and facts.answer == "silent"):
        return  # the process is the reason
    problems: dict[Answer, tuple[Verdict, str, str]] = {
        "no socket": ("bad", "is missing", "restart containerd: it makes its socket when it starts"),
        "no permission": ("note", "this user may not connect", "run as root"),
        "nothing listens": ("bad", "no process listens", "`systemctl restart containerd`"),
        "silent": (
            "bad",
            f"no answer within {ANSWER_SECONDS:.0f} s",
            "`systemctl restart containerd`: containers keep running; `journalctl -u containerd` shows what it did",
        ),
        "refused": ("bad", facts.words, "`journalctl -u containerd` shows why"),
    }
    if facts.answer in problems:
        verdict, found, advice = problems[facts.answer]
        yield HealthFinding(subject, verdict, f"{facts.address}: {found}", advice)
    elif facts.mode & OTHERS:
        found = f"{facts.address} has mode {facts.mode:04o}: every user of the node is root through it"
        yield HealthFinding(subject, "bad", found, f"chmod 0660 {facts.address}")
    else:
        yield HealthFinding(subject, "ok", f"{facts.address} answers")


def _configuration(facts: ContainerdFacts, release: tuple[int, ...]) -> Iterator[HealthFinding]:
    subject = "containerd's configuration"
    broken = [one for one in facts.files if one.problem]
    for one in broken:
        advice = f"correct {one.path} before the next restart: containerd does not start with it"
        yield HealthFinding(subject, "bad", f"{one.path}: {one.problem}", advice)
    if broken:
        return
    if facts.dumped is None:
        advice = f"`{facts.program} config dump` shows what is wrong: containerd does not start with it"
        yield HealthFinding(subject, "bad", facts.dump_words or "cannot be read", advice)
        return
    strange = [one for one in facts.files if _foreign_plugin(one)]
    for one in strange:
        plugin = _foreign_plugin(one)
        found = f"{one.path} is of version {one.form}, and has a table of {plugin}, which containerd ignores there"
        yield HealthFinding(subject, "bad", found, f"remove that table; {SETUP}")
    main = facts.files[0] if facts.files else None
    form = f"version {main.form}" if main else "none, containerd's defaults"
    ours = [name for name, runtime in handlers(facts.dumped).items() if is_ours(runtime)]
    found = f"{form}; handlers of Kybernate: {', '.join(ours) or 'none'}"
    wrong = handlers(facts.dumped).get(HANDLER)
    if wrong is not None and not is_ours(wrong):
        runs = f"runtime_type {wrong.get('runtime_type', '')!r} and runtime_path {wrong.get('runtime_path', '')!r}"
        yield HealthFinding(subject, "bad", f"the handler {HANDLER} has {runs}: not Kybernate's shim", SETUP)
    elif not ours:
        advice = f"pods cannot name Kybernate; {SETUP}"
        yield HealthFinding(subject, "bad", found, advice)
    elif release >= (2, 0) and main is not None and main.form < SPLIT_CRI:
        advice = "run `containerd config migrate` before a drop-in file is added, or settings of CRI are lost"
        yield HealthFinding(subject, "note", found, advice)
    elif not strange:
        yield HealthFinding(subject, "ok", found)


def _foreign_plugin(one: ConfigurationFile) -> str:
    """Return CRI's table that a file has and that counts in files of another version only, "" for none."""
    foreign = SPLIT if one.form < SPLIT_CRI else ONE_PLUGIN
    return foreign if f"{foreign} handlers" in one.plugins else ""


def _handlers(facts: ContainerdFacts) -> Iterator[HealthFinding]:
    """Compare the handlers of the files with those that the process has loaded."""
    if facts.dumped is None or facts.running is None or facts.running.halted:
        return
    ours = [name for name, runtime in handlers(facts.dumped).items() if is_ours(runtime)]
    if not ours:
        return
    missing = [name for name in ours if facts.loaded is not None and name not in facts.loaded]
    newer = [str(one.path) for one in facts.files if one.changed > facts.running.since + CLOCK_SECONDS]
    restart = f"`systemctl restart {facts.running.unit or 'containerd'}`: containers keep running"
    if missing:
        yield HealthFinding("handlers", "bad", f"not loaded: {', '.join(missing)}", restart)
    elif facts.awaited or newer:
        what = ", ".join(newer) or "the configuration"
        yield HealthFinding("handlers", "note", f"{what} has changed since containerd started", restart)
    elif facts.loaded is not None:
        yield HealthFinding("handlers", "ok", f"loaded: {', '.join(ours)}")


def _cri(facts: ContainerdFacts) -> Iterator[HealthFinding]:
    for words in facts.cri:
        if words.startswith("NetworkReady"):
            yield HealthFinding("CRI", "note", words, "pods need a network plugin; `ctr run` works without")
        else:
            yield HealthFinding(
                "CRI", "bad", words, "`ctr plugins ls` shows CRI's state, `journalctl -u containerd` the reason"
            )


def _shim(shim: Shim) -> HealthFinding:
    subject = f"shim of {shim.handler}"
    write = f"`{sys.executable} -Im kybernate_shim.launcher {Path(shim.wanted).parent}` writes it"
    if not shim.path:
        return HealthFinding(subject, "bad", f"{shim.wanted} is missing", write)
    if not shim.version:
        return HealthFinding(subject, "bad", f"{shim.path} does not run: {shim.words or 'it prints nothing'}", write)
    if shim.version != __version__:
        found = f"{shim.path} is of version {shim.version}, this command of version {__version__}"
        return HealthFinding(subject, "bad", found, write)
    return HealthFinding(subject, "ok", f"{shim.path}, version {shim.version}")


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


# ---- what is there


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
        return None, f"`{program} config dump` prints no TOML: {error}"


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
