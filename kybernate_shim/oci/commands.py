"""The command lines of OCI runtimes: which words make runc or crun do what.

Only words, no processes: the daemon runs them asynchronously, the `delete` sub-command without an event loop.
Sources: runc(8) of 1.1 to 1.3, crun(1) of 1.8 to 1.21.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Criu:
    """Where CRIU reads and writes, and which kinds of state it may meet.

    `image_path` holds the images, `work_path` the logs; runtimes create neither of their parents. `extra` are further
    flags of the runtime's checkpoint and restore commands, for example `--manage-cgroups-mode=ignore`. A restore must
    repeat the flags of its dump.
    """

    image_path: Path
    work_path: Path
    tcp_established: bool = False
    ext_unix_sk: bool = False
    shell_job: bool = False
    file_locks: bool = False
    extra: tuple[str, ...] = ()

    def flags(self) -> list[str]:
        flags = ["--image-path", str(self.image_path), "--work-path", str(self.work_path)]
        switches = {
            "--tcp-established": self.tcp_established,
            "--ext-unix-sk": self.ext_unix_sk,
            "--shell-job": self.shell_job,
            "--file-locks": self.file_locks,
        }
        return [*flags, *(flag for flag, on in switches.items() if on), *self.extra]


@dataclass(frozen=True)
class Cli:
    """One runtime binary with its global flags. Every method returns a complete argv.

    `root` holds the runtime's state, namespace included. `log` takes its errors as JSON lines; None leaves them to
    stderr.
    """

    binary: Path
    root: Path
    log: Path | None = None
    systemd_cgroup: bool = False

    @property
    def is_crun(self) -> bool:
        """Whether to speak crun's dialect, which lacks a few of runc's flags. A wrapper is treated as runc."""
        return self.binary.name.startswith("crun")

    def _argv(self, verb: str, *words: str) -> list[str]:
        argv = [str(self.binary), "--root", str(self.root)]
        if self.log is not None:
            argv += ["--log", str(self.log), "--log-format", "json"]
        if self.systemd_cgroup:
            argv.append("--systemd-cgroup")
        return [*argv, verb, *words]

    def create(
        self,
        container: str,
        bundle: Path,
        pid_file: Path,
        *,
        console_socket: Path | None = None,
        no_pivot: bool = False,
        no_new_keyring: bool = False,
    ) -> list[str]:
        words = ["--bundle", str(bundle), "--pid-file", str(pid_file), *_console(console_socket)]
        if no_pivot:
            words.append("--no-pivot")
        if no_new_keyring:
            words.append("--no-new-keyring")
        return self._argv("create", *words, container)

    def start(self, container: str) -> list[str]:
        return self._argv("start", container)

    def exec(self, container: str, process: Path, pid_file: Path, *, console_socket: Path | None = None) -> list[str]:
        """`process` is a file with an OCI process object."""
        words = ["--process", str(process), *_console(console_socket), "--detach", "--pid-file", str(pid_file)]
        return self._argv("exec", *words, container)

    def kill(self, container: str, signal: int, *, all: bool = False) -> list[str]:  # the flag's name
        """`all` means every process in the container's cgroup, not only init."""
        return self._argv("kill", *(["--all"] if all else []), container, str(signal))

    def delete(self, container: str, *, force: bool = False) -> list[str]:
        """With `force`, kill it first, and succeed when there is no such container."""
        return self._argv("delete", *(["--force"] if force else []), container)

    def pause(self, container: str) -> list[str]:
        return self._argv("pause", container)

    def resume(self, container: str) -> list[str]:
        return self._argv("resume", container)

    def update(self, container: str) -> list[str]:
        """Reads OCI LinuxResources as JSON from stdin."""
        return self._argv("update", "--resources", "-", container)

    def checkpoint(self, container: str, criu: Criu, *, leave_running: bool, empty_ns: Sequence[str] = ()) -> list[str]:
        words = criu.flags()
        if not self.is_crun:
            words += [word for kind in empty_ns for word in ("--empty-ns", kind)]
        if leave_running:
            words.append("--leave-running")
        return self._argv("checkpoint", *words, container)

    def restore(
        self,
        container: str,
        bundle: Path,
        pid_file: Path,
        criu: Criu,
        *,
        console_socket: Path | None = None,
        no_pivot: bool = False,
    ) -> list[str]:
        words = [*criu.flags(), "--detach", "--pid-file", str(pid_file), *_console(console_socket)]
        if not self.is_crun:
            words += ["--no-pivot"] if no_pivot else []
            words.append("--no-subreaper")  # the shim is the one that reaps
        return self._argv("restore", *words, "--bundle", str(bundle), container)


def _console(socket: Path | None) -> list[str]:
    return ["--console-socket", str(socket)] if socket is not None else []
