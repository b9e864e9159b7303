"""CRIU's configuration for one container, what CRIU says of itself, and what matters in its logs.

CRIU takes its options from the runtime, and then from a file that the runtime names: the one in the container's
annotation `org.criu.config`, or else /etc/criu/runc.conf. The file has the last word. So the annotation is made to name
a file of ours when the container is created; it does not exist until a checkpoint or a restore writes it (CRIU takes a
file that is not there for an empty one), and it repeats what the node's own file says. Nothing below /etc/criu is
touched.

CRIU runs as root, and some of its options run programs, mount directories of the host or write files. So every line
goes through one function, `line`, and the lines of the node's own file through a list of options that only tune CRIU.

One option cannot go there: CRIU up to 4.2 crashes on `network-lock` in the runtime's file (fixed by its pull request
3051). It goes into a second file, named by the environment, which CRIU reads before it hears from the runtime.
Sources: criu(8), "CONFIGURATION FILES"; runc-checkpoint(8); CRIU's criu/config.c for the form of a line.
"""

from __future__ import annotations

import os
import re
import stat
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from kybernate_shim.checkpoint.criu.claim import FILE_NAME
from kybernate_shim.checkpoint.image.manifest import TcpPolicy
from kybernate_shim.errors import Refused
from kybernate_shim.linux.children import Finished, ProgramTimedOut
from kybernate_shim.linux.private_files import write_private

EARLY_FILE_NAME: Final = "kybernate-criu-early.conf"
NO_PLUGINS: Final = "kybernate-criu-plugins"
CUDA_PLUGIN: Final = "cuda_plugin.so"
ENVIRONMENT: Final = "CRIU_CONFIG_FILE"
EARLY_OPTIONS: Final = ("network-lock",)
OLDEST: Final = (4, 1)  # older ones mishandle frozen containers
CHECK_SECONDS: Final = 30.0

# Printed as an error where a container lacks CAP_SYS_RESOURCE, and of no consequence.
HARMLESS: Final = "rlimit: Can't setup RLIMIT_NOFILE"

# What a user's file may say. Not in here, on purpose: what runs programs (action-script, exec-cmd), names files and
# directories (images-dir, log-file, root, inherit-fd, …), namespaces and cgroups to enter, or another process's label.
# fmt: off
ALLOWED: Final = frozenset({
    "allow-uprobes", "auto-dedup", "cpu-cap", "display-stats", "enable-fs", "evasive-devices", "ext-unix-sk",
    "external", "file-locks", "file-validation", "force-irmap", "freeze-cgroup", "ghost-fiemap", "ghost-limit",
    "irmap-scan-path", "libdir", "link-remap", "manage-cgroups", "max-parallel", "mntns-compat-mode", "network-lock",
    "orphan-pts-master", "shell-job", "skip-in-flight", "skip-file-rwx-check", "skip-fsnotify", "skip-mnt",
    "tcp-close", "tcp-established", "timeout", "track-mem", "verbosity", "weak-sysctls",
})
# fmt: on
USERS_FILE_BYTES: Final = 64 << 10
LINE: Final = re.compile(r"[a-z][a-z0-9-]*(?: [^-\s\"#\x00-\x1f\x7f][^\s\"#\x00-\x1f\x7f]*)?")

# Options of which at most one makes sense; the user's choice of one displaces ours of another.
EXCLUSIVE: Final = (frozenset({"tcp-close", "tcp-established"}),)
REPEATABLE: Final = ("external", "irmap-scan-path", "skip-mnt")


@dataclass(frozen=True)
class CriuOptions:
    """What we want of CRIU, for a dump and, the same, for the restore of it.

    `ghost_limit` is the most bytes of a deleted but open file that are carried along. `timeout` is in seconds, for CRIU
    to seize all of a container's threads, which are frozen already: CRIU's default of 10 s may be too short for
    thousands of threads, but one that cannot be seized keeps the others frozen as long. `libdir` is the directory of
    plugins, which is a matter of the node: None for none.
    """

    tcp: TcpPolicy = "close"
    network_lock: bool = False
    shell_job: bool = False
    file_locks: bool = True
    link_remap: bool = True
    ext_unix_sk: bool = False
    ghost_limit: int = 512 << 20
    timeout: int = 60
    libdir: Path | None = None
    extra: tuple[str, ...] = ()  # whole lines, of mounts for example

    def lines(self) -> list[str]:
        """Return the configuration, one option a line. Raises Refused."""
        switches = {
            "tcp-close": self.tcp == "close",
            "tcp-established": self.tcp == "established",
            "skip-in-flight": True,  # no process has accepted them yet, and their peers try again
            "shell-job": self.shell_job,
            "file-locks": self.file_locks,
            "link-remap": self.link_remap,
            "ext-unix-sk": self.ext_unix_sk,
        }
        values = {"ghost-limit": self.ghost_limit, "timeout": self.timeout, "libdir": self.libdir}
        lines = [line(name) for name, wanted in switches.items() if wanted]
        lines += [line(name, str(value)) for name, value in values.items() if value is not None]
        if not self.network_lock:
            lines.append(line("network-lock", "skip"))
        return [*lines, *self.extra]


def line(option: str, value: str = "") -> str:
    """Return one line of CRIU's configuration file.

    Raises Refused for what its reader would cut, or take for another line or another option.
    """
    text = f"{option} {value}" if value else option
    if not LINE.fullmatch(text):
        raise Refused(
            f'{option}: CRIU cannot read {value!r} from a file, because of a blank, a line break, " or #, or a'
            " leading -"
        )
    return text


@dataclass(frozen=True)
class Configuration:
    """CRIU's configuration: all lines, for the manifest, and the variables that the runtime's environment must have."""

    lines: tuple[str, ...]
    environment: dict[str, str]


def write_config(directory: Path, options: CriuOptions, users: Iterable[Path | None]) -> Configuration:
    """Write the two files that CRIU reads into `directory`, ours first and the lines of the users' files after them.

    An option that a user's file has, in whatever form, is left to it. Without a directory of plugins, CRIU would load
    all of /usr/lib/criu: so it gets an empty one. Raises Refused and OSError.
    """
    theirs = [allowed(text, path) for path in users if path for text in read_lines(path)]
    if options.libdir is None:
        empty = directory / NO_PLUGINS
        empty.mkdir(mode=0o700, exist_ok=True)
        options = replace(options, libdir=empty)
    lines = (*without(options.lines(), theirs), *theirs)
    early = [text for text in lines if _option(text) in EARLY_OPTIONS]
    _write(directory / EARLY_FILE_NAME, early)
    _write(directory / FILE_NAME, [text for text in lines if text not in early])
    return Configuration(lines, {ENVIRONMENT: str(directory / EARLY_FILE_NAME)})


def refuse_cuda_plugin(configuration: Configuration) -> None:
    """Raise Refused where CRIU would load its plugin for CUDA, for containers with GPU state.

    It would find their processes checkpointed already, which it takes for its own doing or for a failure.
    """
    chosen = [text.split(maxsplit=1)[1] for text in configuration.lines if _option(text) == "libdir"]
    plugin = Path(chosen[-1], CUDA_PLUGIN) if chosen else None
    if plugin is not None and plugin.exists():
        raise Refused(
            f"CRIU would load {plugin}, which conflicts with Kybernate: GPU state is offloaded and reloaded without"
            " it. Remove"
            " it there, or set `criu_libdir` (or libdir in CRIU's own file) to another directory; nothing was changed"
        )


def _write(path: Path, lines: Iterable[str]) -> None:
    text = "".join(f"{line(*text.split(' ', 1))}\n" for text in lines)  # checked here, wherever they were made
    write_private(path, text)


def read_lines(path: Path) -> list[str]:
    """Return a configuration file's lines without comments; a file that is not there has none, as CRIU sees it.

    Raises Refused for what is not such a file, or for one that another user than root can write.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return []
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > USERS_FILE_BYTES:
            raise Refused(f"{path}: not a configuration file of CRIU's. Nothing was changed")
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise Refused(
                f"{path} belongs to uid {status.st_uid} and has mode {status.st_mode & 0o7777:04o}: CRIU runs as"
                " root, so"
                f" only root may write its options (`chown root {path}; chmod go-w {path}`). Nothing was changed"
            )
        text = file.read(USERS_FILE_BYTES).decode(errors="replace")
    return [text for raw in text.splitlines() if (text := raw.strip()) and not text.startswith("#")]


def allowed(text: str, path: Path) -> str:
    """Return a line of a user's file in our form. Raises Refused for an option that is not allowed there."""
    if _option(text) not in ALLOWED:
        raise Refused(
            f"{path}: the option {text.split()[0]!r} is not allowed: CRIU runs as root, and it could run programs or"
            " reach"
            " files there. Remove the line; nothing was changed"
        )
    return line(*text.split(maxsplit=1))


def without(ours: Iterable[str], theirs: Iterable[str]) -> list[str]:
    """Return the lines of `ours` whose option no line of `theirs` sets; repeatable options stay."""
    taken = {_option(text) for text in theirs}
    for group in EXCLUSIVE:
        if taken & group:
            taken |= group
    return [text for text in ours if _option(text) not in taken or _option(text) in REPEATABLE]


def _option(text: str) -> str:
    return text.split(maxsplit=1)[0].removeprefix("no-")


class CriuRunner(Protocol):
    """Runs a helper program; linux.children.Children does."""

    async def run(self, argv: Sequence[str], *, timeout: float | None = None) -> Finished: ...


async def criu_version(runner: CriuRunner, criu: str = "criu") -> str:
    """Return what `criu --version` says. Raises Refused."""
    finished = await _run(runner, [criu, "--version"])
    found = re.search(r"Version:\s*(\S+)", finished.stdout)
    if finished.status != 0 or found is None:
        words = (finished.stderr or finished.stdout).strip()
        raise Refused(f"{criu} --version ended with status {finished.status}: {words}")
    return found[1]


def parse_version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 4.1.1-2 is (4, 1, 1); no numbers at all is ()."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return tuple(map(int, found[1].split("."))) if found else ()


async def _run(runner: CriuRunner, argv: Sequence[str]) -> Finished:
    try:
        return await runner.run(argv, timeout=CHECK_SECONDS)
    except OSError as error:
        raise Refused(f"{argv[0]} cannot be run ({error}); install CRIU or name it in the setting `criu`") from error
    except ProgramTimedOut as error:
        raise Refused(str(error)) from error


def errors_of(log: Path, most: int = 10) -> list[str]:
    """Return the last lines that matter in a CRIU log: errors, or where there are none, its last three lines.

    Times and process numbers are taken off, repetitions too. An absent or empty log has no lines.
    """
    errors: deque[str] = deque(maxlen=most)
    last: deque[str] = deque(maxlen=3)
    try:
        with log.open(errors="replace") as stream:
            for raw in stream:
                text = re.sub(r"^\(\d+\.\d+\)\s*(\d+:\s)?\s*", "", raw.rstrip())
                if text:
                    last.append(text)
                if re.match(r"Error \(|BUG ", text) and text not in errors and HARMLESS not in text:
                    errors.append(text)
    except FileNotFoundError:
        return []
    return list(errors or last)


def explain(message: str, log: Path) -> str:
    """Return an error's text with what CRIU's log says of it and where the whole log is."""
    lines = errors_of(log)
    if not lines:
        return f"{message} (CRIU left no log at {log})"
    return f"{message}: {'; '.join(lines)} (whole log: {log})"
