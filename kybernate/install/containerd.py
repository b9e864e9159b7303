"""Puts Kybernate into the containerd of this node: finds it, changes its configuration, restarts and verifies it.

What is written is compared with what containerd makes of it before containerd is restarted, and a container is run
afterwards. Whatever fails, the earlier files come back, and containerd runs with them.
"""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kybernate.install.containerd_config import Files, changes, difference, handler, imported, strayed
from kybernate.node.containerd import DEFAULT_ADDRESS
from kybernate.node.containerd_facts import SHIM
from kybernate.node.containerd_process import (
    AWAITED,
    DEFAULT_CONFIGURATION,
    ContainerdProcess,
    find_process,
    imported_files,
    is_alive,
    is_awaited,
)
from kybernate.node.failure import Failure
from kybernate.node.finding import ask_program
from kybernate_shim.checkpoint.criu.config import parse_version
from kybernate_shim.linux.atomic_write import replace_file

RUNTIME: Final = "io.containerd.kybernate.v1"
PROGRAM_PLACE: Final = f"/usr/local/bin/{SHIM}"
LAUNCHER: Final = (sys.executable, "-Im", "kybernate_shim.launcher")  # writes the program
READY_SECONDS: Final = 60.0  # for containerd to answer after its restart
TRIAL_SECONDS: Final = 60.0  # for a container to run and to be removed
MODE: Final = 0o644  # of a configuration file that was not there before, as Debian's package has it
TRIALS: Final = Path("/var/lib/kybernate")  # /run and /tmp may be mounted noexec
TRIAL: Final = "/bin/true"
LIBRARY: Final = re.compile(r"(/\S+) \(0x")  # in what ldd prints


@dataclass(frozen=True)
class Installed:
    """The containerd of this node. `running` is its process, None where none runs."""

    program: str
    release: tuple[int, ...]
    files: Files
    running: ContainerdProcess | None = None


@dataclass(frozen=True)
class SetupOutcome:
    """What a setup has done. `pending` says what is left to the administrator, "" where nothing is."""

    changed: tuple[str, ...]
    restarted: bool
    verified: bool
    pending: str = ""


def installed(config: Path | None = None) -> Installed:
    """Return the containerd that runs, or the one that is installed; `config` names another main file.

    Raises Failure, also for a main file that cannot be read as TOML.
    """
    running = find_process()
    program = running.program if running is not None else shutil.which("containerd")
    main = running.configuration if running is not None else DEFAULT_CONFIGURATION
    if not program:
        raise Failure(
            "there is no containerd on this node: none runs, and none is in PATH",
            state="nothing was changed",
            advice="install containerd 1.7 or newer",
        )
    status, words = ask_program(program, "--version")
    release = parse_version(words.split()[2]) if not status and len(words.split()) > 2 else ()
    if not release:
        raise Failure(f"{program} does not print its version: {words}", state="nothing was changed")
    return Installed(program, release, _files(config or main), running)


def planned(found: Installed, shim: str = PROGRAM_PLACE) -> tuple[Mapping[Path, str], str]:
    """Return the new texts of the files that change, and the difference as text. Raises Failure."""
    changed = changes(found.files, found.release, shim)
    return changed, difference(found.files, changed)


def set_up(
    found: Installed,
    changed: Mapping[Path, str],
    *,
    restart: Sequence[str] = (),
    address: str = DEFAULT_ADDRESS,
    step: Callable[[str], object] = lambda words: None,
) -> SetupOutcome:
    """Write what `planned` returned, restart containerd and run a container; after a failure all is as before.

    `restart`: the command that restarts containerd, by default that of its systemd service. Without either, the files
    are written and compared, and the restart is left to the administrator. Raises Failure.
    """
    names = tuple(map(str, changed))
    if not has_shim():
        step(f"write {PROGRAM_PLACE}")
        _write_shim()
    unit = found.running.unit if found.running is not None else ""
    command = list(restart) or (["systemctl", "restart", unit] if unit else [])
    stale = found.running is not None and is_awaited(found.running)
    before = _dumped(found)
    kept = {path: path.read_bytes() if path.exists() else None for path in changed}
    try:
        step("write the configuration")
        for path, text in changed.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            mode = path.stat().st_mode & 0o7777 if path.exists() else MODE
            replace_file(path, text, mode=mode, durable=True)
        _require_meant(found, before)
    except BaseException:
        _put_back(kept)
        raise
    if not command and (changed or stale):
        _await_restart(found)
        return SetupOutcome(names, False, False, "restart containerd, then run this again: it verifies the handler")
    if changed or stale:
        step(f"restart containerd: {' '.join(command)}")
        try:
            _restart(command, found, address)
            step("run a container")
            run_container(address)
        except (Failure, KeyboardInterrupt) as error:
            _put_back(kept)
            if changed:
                _restart(command, found, address)
            if isinstance(error, Failure):
                error.state = "the earlier configuration is back, and containerd runs with it"
            raise
        return SetupOutcome(names, True, True)
    step("run a container")
    run_container(address)
    return SetupOutcome((), False, True)


def has_shim() -> bool:
    """Return whether the program that containerd executes is there, and is the one of this installation."""
    return not ask_program(*LAUNCHER, "--check", str(Path(PROGRAM_PLACE).parent))[0]


def _write_shim() -> None:
    status, words = ask_program(*LAUNCHER, str(Path(PROGRAM_PLACE).parent))
    if status:
        raise Failure(f"{PROGRAM_PLACE} cannot be written: {words}", state="containerd's configuration was not changed")


def run_container(address: str = DEFAULT_ADDRESS) -> None:
    """Run this node's `true` as a container, and remove it. Raises Failure."""
    name = f"kybernate-setup-{secrets.token_hex(4)}"
    ctr = ["ctr", "--address", address]
    try:
        TRIALS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=TRIALS, prefix="setup-") as root:
            _fill(Path(root))
            argv = [*ctr, "run", "--rm", "--runtime", RUNTIME, "--rootfs", root, name, TRIAL]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False)
            if done.returncode:
                for rest in (("tasks", "rm", "--force"), ("containers", "rm")):
                    ask_program(*ctr, *rest, name)
        status, words = done.returncode, (done.stderr or done.stdout).strip()
    except subprocess.TimeoutExpired:
        status, words = 1, f"it has not ended after {TRIAL_SECONDS:.0f} s; `ctr tasks rm --force {name}` ends it"
    except OSError as error:
        status, words = 1, str(error)
    if status:
        raise Failure(
            f"a container of {RUNTIME} does not run: {words}", advice="`kybernate doctor` names what this node lacks"
        )


def _fill(root: Path) -> None:
    """Make a root filesystem of `true` and the libraries that it loads; no image is needed. Raises OSError."""
    _, words = ask_program("ldd", TRIAL)
    for path in {TRIAL, *LIBRARY.findall(words)}:
        copy = root / path.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    for directory in ("proc", "dev", "sys", "run"):
        (root / directory).mkdir(exist_ok=True)
    root.chmod(0o755)


# ---- finding


def _files(main: Path) -> Files:
    """Read a configuration: the files that are imported, in containerd's order, after the main one."""
    texts: dict[Path, str] = {}
    try:
        if main.exists():
            texts[main] = main.read_text()
            imports = imported_files(main, imported(texts[main], main))
            texts |= {path: path.read_text() for path in imports}
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"{main} or what it imports cannot be read: {error}", state="nothing was changed") from error
    return Files(main, texts)


def _await_restart(found: Installed) -> None:
    """Note that this process of containerd does not know what was written. Raises OSError."""
    if found.running is not None:
        AWAITED.parent.mkdir(parents=True, exist_ok=True)
        replace_file(AWAITED, f"{found.running.pid} {found.running.since}")


# ---- changing


def _dumped(found: Installed) -> dict[str, Any]:
    """Return the configuration as containerd understands it. Raises Failure."""
    argv = [found.program, "--config", str(found.files.main), "config", "dump"]
    status, words = ask_program(*argv, warnings=False)
    try:
        if status:
            raise Failure(
                f"containerd does not accept its configuration: {words}",
                state="nothing was changed",
                advice="correct it first",
            )
        return tomllib.loads(words)
    except tomllib.TOMLDecodeError as error:
        raise Failure(f"`{' '.join(argv)}` prints invalid TOML: {error}", state="nothing was changed") from error


def _require_meant(found: Installed, before: Mapping[str, Any]) -> None:
    """Raise Failure unless containerd finds the handler in what was written, and all else as it was."""
    after = _dumped(found)
    if other := strayed(before, after):
        raise Failure(
            f"with the handler, containerd would change other settings: {', '.join(other)}",
            state="the earlier configuration is back; containerd was not restarted",
            advice="add the table of packaging/containerd by hand",
        )
    if not handler(after):
        raise Failure(
            "containerd does not find the handler in the new configuration",
            state="the earlier configuration is back; containerd was not restarted",
            advice="add the table of packaging/containerd by hand",
        )


def _put_back(kept: Mapping[Path, bytes | None]) -> None:
    for path, content in kept.items():
        if content is None:
            path.unlink(missing_ok=True)
        else:
            replace_file(path, content, mode=path.stat().st_mode & 0o7777 if path.exists() else MODE, durable=True)


def _restart(command: Sequence[str], found: Installed, address: str) -> None:
    """Restart containerd and wait until another process of it answers. Raises Failure."""
    status, words = ask_program(*command)
    if status:
        raise Failure(f"`{' '.join(command)}` ended with {status}: {words}")
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        status, words = ask_program("ctr", "--address", address, "--timeout", "5s", "version")
        if not status and not (found.running is not None and is_alive(found.running)):
            return
        time.sleep(0.2)
    raise Failure(f"containerd does not answer on {address} after its restart: {words}")
