"""The files that the shim keeps in a bundle, next to config.json and rootfs, which are containerd's.

`runtime`, `options.json` and `init.pid` have the form that containerd's own shim gives them: after a restart containerd
may call that shim's `delete` on our bundle. `kybernate.json` is ours, and says what a `delete` without a daemon has to
undo. All of it vanishes with the container.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kybernate_shim.linux.atomic_write import replacing
from kybernate_shim.linux.private_files import DIRECTORY_MODE
from kybernate_shim.linux.process import boot_id

if TYPE_CHECKING:
    from kybernate_shim.oci.options import RuntimeOptions  # it loads protobuf, which `delete` has no time for

CONFIG = "config.json"
CONNECTED = "connected"  # in the bundle of a pod's first container: a directory for each other one
RECORDS = (CONFIG, "runtime", "options.json", "kybernate.json")  # what a `delete` needs


@dataclass(frozen=True)
class CleanupRecord:
    """What a container leaves behind when its daemon dies, as kybernate.json holds it.

    `phase` is the operation that runs (`create`, `checkpoint`, `restore`, `suspend`, `park`), or `idle`.
    `cgroup` is the directory that has the container's processes, "" before there are any.
    `locked_pids` are processes whose GPU state is locked or taken out; they hang until that is undone. Unless they are
    `whole`, a part of their memory is only in an image, and they must not run.
    `parking_root` is where it has parked VRAM, "" where it never has.
    `temporary` are directories to remove. `boot` is the boot id: records of an earlier boot are ignored.
    """

    runtime: str = ""
    root: str = ""
    systemd_cgroup: bool = False
    phase: str = "idle"
    cgroup: str = ""
    locked_pids: tuple[int, ...] = ()
    whole: bool = True
    parking_root: str = ""
    temporary: tuple[str, ...] = ()
    boot: str = ""


@dataclass(frozen=True)
class Bundle:
    """A bundle directory. Writing is atomic: a reader sees the whole old file or the whole new one."""

    path: Path

    @property
    def rootfs(self) -> Path:
        return self.path / "rootfs"

    @property
    def work(self) -> Path:
        """containerd's persistent directory for the container; it is removed with the container."""
        return self.path / "work"

    @property
    def log(self) -> Path:
        """The OCI runtime's log."""
        return self.path / "log.json"

    # -- The runtime and its options --------------------------------------------------------------------------------

    def write_runtime(self, binary: Path, options: RuntimeOptions, *, root: Path, systemd_cgroup: bool) -> None:
        """Leave a record for `delete`: which runtime, and options with the root and cgroup driver that were decided.

        `root` does not include the containerd namespace, which containerd's own shim appends when it reads this.
        """
        self._write("runtime", str(binary))
        decided = replace(options, binary_name=str(binary), root=str(root), systemd_cgroup=systemd_cgroup)
        self._write("options.json", json.dumps(_go_form(decided), separators=(",", ":")))

    def runtime(self) -> str:
        """Return the runtime's program, "" when the file is missing."""
        return self._read("runtime").strip()

    def options(self) -> dict[str, Any]:
        """Return options.json: a key that is missing has its type's empty value, as in Go. Unreadable means empty."""
        return _object(self._read("options.json"))

    # -- Its pod ------------------------------------------------------------------------------------------------------

    def complete(self, address: str) -> None:
        """Write what is in a bundle after our program was executed for its container: `address`, and the program.

        containerd 2 connects a pod's further containers to its daemon without executing anything. After a restart, it
        would `delete` those by the program that their runtime's name leads to. When the daemon dies before, it removes
        their bundles and does not call `delete`. So their records are in the bundle of the pod's first container, for
        which it calls `delete`, and links to them are here. Raises OSError.
        """
        if (self.path / "address").exists():
            return
        first = Bundle(self.path.parent / sandbox) if (sandbox := self._sandbox()) else None
        if first is not None and (program := first._read("shim-binary-path")):
            self._write("shim-binary-path", program)
            self._keep_records_in(first.path / CONNECTED / self.path.name)
        self._write("address", address)

    def connected(self) -> dict[str, Bundle]:
        """Return the records of containers that containerd has connected to the daemon of this one, by their ids."""
        try:
            return {path.name: Bundle(path) for path in (self.path / CONNECTED).iterdir()}
        except FileNotFoundError:
            return {}

    def forget_records(self) -> None:
        """Remove the records that are not in this bundle, after the end of the container. Idempotent, and no error."""
        if not (sandbox := self._sandbox()):
            return
        records = self.path.parent / sandbox / CONNECTED / self.path.name
        with suppress(OSError):  # they vanish with the pod's first bundle at the latest
            for name in RECORDS:
                (records / name).unlink(missing_ok=True)
            records.rmdir()

    def _keep_records_in(self, directory: Path) -> None:
        for missing in (directory.parent, directory):
            missing.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        os.link(self.path / CONFIG, directory / CONFIG)
        for name in RECORDS:
            if name != CONFIG:
                (self.path / name).symlink_to(directory / name)

    def _sandbox(self) -> str:
        """Return the id of the pod's sandbox as containerd 2 has left it, "" without one."""
        return Path(self._read("sandbox").strip()).name

    # -- Pids -------------------------------------------------------------------------------------------------------

    @property
    def init_pid_file(self) -> Path:
        return self.path / "init.pid"

    def exec_pid_file(self, exec_id: str) -> Path:
        # An exec may be called `init`; its pid must not pass for that of the container's.
        return self._own(exec_id, ".exec.pid" if exec_id == "init" else ".pid")

    def init_pid(self) -> int:
        """Return the pid of init on the host. Raises OSError."""
        return _pid(self.init_pid_file)

    def init_pid_or_zero(self) -> int:
        """Return the pid of init on the host, 0 when the runtime wrote none."""
        try:
            return self.init_pid()
        except OSError:
            return 0

    def exec_pid(self, exec_id: str) -> int:
        """Return the pid of an exec on the host. Raises OSError."""
        return _pid(self.exec_pid_file(exec_id))

    # -- Execs ------------------------------------------------------------------------------------------------------

    def process_file(self, exec_id: str) -> Path:
        return self._own(exec_id, ".process.json")

    def write_process(
        self, exec_id: str, process: bytes, *, terminal: bool, edit: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        """Write an exec's OCI process object, with the terminal flag of the request, which overrides its own.

        `edit` makes further changes. Raises ValueError when `process` is not a JSON object, or `exec_id` no file name.
        """
        document = json.loads(process)
        if not isinstance(document, dict):
            raise ValueError(f"process of exec {exec_id} is not a JSON object")
        if edit is not None or document.get("terminal", False) is not terminal:
            document["terminal"] = terminal
            if edit is not None:
                edit(document)
            process = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
        self._write_new(self.process_file(exec_id), process)

    def forget_exec(self, exec_id: str) -> None:
        """Remove the files of an exec. Idempotent."""
        self.process_file(exec_id).unlink(missing_ok=True)
        self.exec_pid_file(exec_id).unlink(missing_ok=True)

    # -- Records for a delete without a daemon ----------------------------------------------------------------------

    def write_cleanup_record(self, cleanup_record: CleanupRecord) -> None:
        """Replace kybernate.json, and put the current boot's id into it."""
        self._write("kybernate.json", json.dumps(asdict(replace(cleanup_record, boot=boot_id()))))

    def cleanup_record(self) -> CleanupRecord | None:
        """Return what kybernate.json holds; None without a readable one of this boot.

        Unknown keys of a newer shim are ignored; keys that an older one lacks have their defaults.
        """
        document = _object(self._read("kybernate.json"))
        if document.get("boot") != boot_id():
            return None
        known = {key.name: document[key.name] for key in fields(CleanupRecord) if key.name in document}
        for name in ("locked_pids", "temporary"):
            known[name] = tuple(known.get(name) or ())
        return CleanupRecord(**known)

    # ---------------------------------------------------------------------------------------------------------------

    def _own(self, exec_id: str, suffix: str) -> Path:
        if not exec_id or "/" in exec_id or "\0" in exec_id:
            raise ValueError(f"exec id {exec_id!r} cannot be part of a file name")
        return self.path / f"{exec_id}{suffix}"

    def _write(self, name: str, content: str) -> None:
        path = self.path / name
        with replacing(path.readlink() if path.is_symlink() else path) as file:
            file.write(content)

    def _write_new(self, path: Path, content: bytes) -> None:
        """Write a file that no process reads yet, with no more system calls than that takes. Raises OSError."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if os.write(fd, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(fd)

    def _read(self, name: str) -> str:
        try:
            return (self.path / name).read_text(errors="replace")
        except OSError:
            return ""


def _go_form(options: RuntimeOptions) -> dict[str, object]:
    """Return the fields of containerd.runc.v1.Options as Go writes them: snake case, without the empty ones."""
    known = {
        "no_pivot_root": options.no_pivot_root,
        "no_new_keyring": options.no_new_keyring,
        "shim_cgroup": options.shim_cgroup,
        "io_uid": options.io_uid,
        "io_gid": options.io_gid,
        "binary_name": options.binary_name,
        "root": options.root,
        "systemd_cgroup": options.systemd_cgroup,
        "criu_image_path": options.criu_image_path,
        "criu_work_path": options.criu_work_path,
    }
    return {name: value for name, value in known.items() if value}


def _object(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _pid(path: Path) -> int:
    try:
        pid = int(path.read_text())
    except (OSError, ValueError) as error:
        raise OSError(f"{path}: {error}") from error
    if pid <= 0:
        raise OSError(f"{path}: {pid} is not a process ID")
    return pid
