"""The files that the shim keeps in a bundle, next to config.json and rootfs, which are containerd's.

`runtime`, `options.json` and `init.pid` have the form that containerd's own shim gives them: after a restart containerd
may call that shim's `delete` on our bundle. `kybernate.json` is ours, and says what a `delete` without a daemon has to
undo. All of it vanishes with the container.
"""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kybernate_shim.linux.atomic_write import replacing
from kybernate_shim.linux.process import boot_id

if TYPE_CHECKING:
    from kybernate_shim.oci.options import RuntimeOptions  # it loads protobuf, which `delete` has no time for


class PidMissing(Exception):
    """A pid file is missing or holds no pid: the runtime said that it had started a process, and it had not."""


@dataclass(frozen=True)
class CleanupRecord:
    """What a container leaves behind when its daemon dies, as kybernate.json holds it.

    `phase` is the operation that runs (`create`, `checkpoint`, `restore`, `suspend`), or `idle`.
    `cgroup` is the directory that has the container's processes, "" before there are any.
    `locked_pids` are processes whose GPU state is locked or taken out; they hang until it is given back. Unless they
    are `whole`, a part of their memory is in an image only, and they must not run.
    `temporary` are directories to remove. `boot` is the boot id: what an earlier boot left means nothing.
    """

    runtime: str = ""
    root: str = ""
    systemd_cgroup: bool = False
    phase: str = "idle"
    cgroup: str = ""
    locked_pids: tuple[int, ...] = ()
    whole: bool = True
    temporary: tuple[str, ...] = ()
    boot: str = ""


@dataclass(frozen=True)
class Bundle:
    """A bundle directory. Writing is atomic: a reader sees the old file or the new one, whole."""

    path: Path

    @property
    def rootfs(self) -> Path:
        return self.path / "rootfs"

    @property
    def work(self) -> Path:
        """containerd's persistent directory for the container; it goes when the container does."""
        return self.path / "work"

    @property
    def log(self) -> Path:
        """The OCI runtime's log."""
        return self.path / "log.json"

    # -- The runtime and its options --------------------------------------------------------------------------------

    def write_runtime(self, binary: Path, options: RuntimeOptions, *, root: Path, systemd_cgroup: bool) -> None:
        """Leave a record for `delete`: which runtime, and options with the root and cgroup driver that were decided.

        `root` comes without the containerd namespace, which containerd's own shim appends when it reads this.
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

    # -- Pids -------------------------------------------------------------------------------------------------------

    @property
    def init_pid_file(self) -> Path:
        return self.path / "init.pid"

    def exec_pid_file(self, exec_id: str) -> Path:
        # An exec may be called `init`; its pid must not pass for that of the container's.
        return self._own(exec_id, ".exec.pid" if exec_id == "init" else ".pid")

    def init_pid(self) -> int:
        """Return the pid of init on the host. Raises PidMissing."""
        return _pid(self.init_pid_file)

    def init_pid_or_zero(self) -> int:
        """Return the pid of init on the host, 0 when the runtime wrote none."""
        try:
            return self.init_pid()
        except PidMissing:
            return 0

    def exec_pid(self, exec_id: str) -> int:
        """Return the pid of an exec on the host. Raises PidMissing."""
        return _pid(self.exec_pid_file(exec_id))

    # -- Execs ------------------------------------------------------------------------------------------------------

    def process_file(self, exec_id: str) -> Path:
        return self._own(exec_id, ".process.json")

    def write_process(self, exec_id: str, process: bytes, *, terminal: bool) -> None:
        """Write an exec's OCI process object, with the terminal flag of the request, which overrides its own.

        Raises ValueError when `process` is not a JSON object, or `exec_id` no file name.
        """
        document = json.loads(process)
        if not isinstance(document, dict):
            raise ValueError(f"process of exec {exec_id} is not a JSON object")
        if document.get("terminal", False) is not terminal:
            document["terminal"] = terminal
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

        Keys of a newer shim are passed over, those of an older one have their defaults.
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
        with replacing(self.path / name) as file:
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
        raise PidMissing(f"{path}: {error}") from error
    if pid <= 0:
        raise PidMissing(f"{path}: {pid} is not a process ID")
    return pid
