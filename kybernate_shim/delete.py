"""`delete`: remove what a container left behind, without its daemon.

containerd calls it after every container, mostly when all is gone already, and after a daemon has died, when nothing
is. It must be idempotent and quick, and stdout carries the answer alone.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate_shim.address import answers, clear_away
from kybernate_shim.invocation import Invocation
from kybernate_shim.oci.bundle import Bundle

if TYPE_CHECKING:
    from kybernate_shim.linux.cgroup.cgroup import Cgroup  # nearly every `delete` needs none

KILLED = 137
RUNTIME_SECONDS = 4.0  # containerd gives the whole of `delete` five
OPERATION_SECONDS = 2.0
AT_ONCE = 16
DEFAULT_ROOT = "/run/containerd/runc"


def delete(invocation: Invocation) -> int:
    """Remove the container from its runtime, unmount its rootfs, and print a DeleteResponse.

    If its daemon is dead, its socket goes, too, and with the first container of a pod all that containerd has connected
    to that daemon: it calls no `delete` for those, and their processes would run on, and no program would know of them.
    Exits with 1, and with the reason on stderr, when something is left: containerd then keeps the bundle.
    """
    bundle = Bundle(Path(invocation.bundle or Path.cwd().parent / invocation.id))
    pid = bundle.init_pid_or_zero()
    problems = _remove(invocation, bundle, bundle.path)
    try:
        if socket := _dead_daemons_socket(bundle):
            problems += _remove_connected(invocation, bundle)
            clear_away(socket)
    except OSError as error:
        problems.append(str(error))
    sys.stdout.buffer.write(answer(pid, time.time_ns()))
    for problem in problems:
        sys.stderr.write(f"containerd-shim-kybernate-v1: delete {invocation.id}: {problem}\n")
    return 1 if problems else 0


def _remove_connected(invocation: Invocation, first: Bundle) -> list[str]:
    """Remove a pod's further containers, in parallel, since the runtime waits for the end of each."""
    connected = first.connected()
    if not connected:
        return []
    from concurrent.futures import ThreadPoolExecutor  # daemons seldom die

    def remove(id: str) -> list[str]:
        return _remove(invocation._replace(id=id), connected[id], first.path.parent / id)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [
            f"{id}: {problem}"
            for id, problems in zip(connected, pool.map(remove, connected), strict=True)
            for problem in problems
        ]


def _remove(invocation: Invocation, bundle: Bundle, place: Path) -> list[str]:
    """Remove the container and unmount its rootfs; return what went wrong, in words.

    `bundle` has its records, and `place` is or was its bundle.
    """
    from kybernate_shim.linux.mount.rootfs import unmount_tree
    from kybernate_shim.run_directory import turn_file

    problems = _end_and_forget(invocation, bundle, place)
    try:
        turn_file(invocation.namespace, invocation.id).unlink(missing_ok=True)
        unmount_tree(Bundle(place).rootfs)
        _remove_parked(bundle)
    except OSError as error:
        problems.append(str(error))
    return problems


def _end_and_forget(invocation: Invocation, bundle: Bundle, place: Path) -> list[str]:
    """End what the daemon did not live to see finished, and delete the container; return what went wrong, in words."""
    cleanup_record = bundle.cleanup_record()
    if cleanup_record is None or cleanup_record.phase not in ("checkpoint", "restore"):
        return _forget_in_runtime(invocation, bundle)
    # Here, because nearly every `delete` is done by now.
    from kybernate_shim.checkpoint.cgroup_lease import forget, inherited
    from kybernate_shim.checkpoint.cleanup import Traces, work_name
    from kybernate_shim.checkpoint.criu.config import EARLY_FILE_NAME
    from kybernate_shim.checkpoint.image.plaintext_memory import remove_stale
    from kybernate_shim.errors import Failed, Refused
    from kybernate_shim.run_directory import ARRIVING, DUMPS

    problems = []
    cgroups_path = _cgroups_path(bundle)
    with inherited(cgroups_path, place) as ours:
        traces = Traces(
            configuration=place / EARLY_FILE_NAME,
            cgroups_path=cgroups_path if ours else "",
            state=Path(cleanup_record.root) / invocation.id,
            work=work_name(invocation.namespace, invocation.id),
        )
        try:
            if cleanup_record.phase == "restore":
                traces.clear_restore(seconds=OPERATION_SECONDS)
            else:
                traces.end_programs(seconds=OPERATION_SECONDS)
        except (Failed, Refused, OSError) as error:
            problems.append(str(error))
        remove_stale()  # the daemon has ended, and now CRIU has, too
        remove_stale(DUMPS)
        remove_stale(ARRIVING)  # of a command that was killed
        problems += _forget_in_runtime(invocation, bundle)  # which kills by the cgroup as well
        if ours and not problems:
            forget(cgroups_path)
    return problems


def _remove_parked(bundle: Bundle) -> None:
    """Remove what is parked of processes that have ended. Raises OSError."""
    if (record := bundle.cleanup_record()) is None or not record.parking_root:
        return
    from kybernate_shim.arena.memory import Memory  # few containers are parked
    from kybernate_shim.arena.parked import clear

    clear(Path(record.parking_root), Memory(0))


def _cgroups_path(bundle: Bundle) -> str:
    """Return config.json's cgroupsPath, "" where there is none to be read."""
    from kybernate_shim.errors import Invalid
    from kybernate_shim.oci.spec import Spec

    try:
        return Spec.read(bundle.path).cgroups_path
    except Invalid:
        return ""


def _forget_in_runtime(invocation: Invocation, bundle: Bundle) -> list[str]:
    """Kill and delete the container; return what went wrong, in words.

    A runtime that knows nothing of it is success: mostly the daemon has deleted it before.
    """
    from kybernate_shim.oci.commands import Cli

    options = bundle.options()
    root = Path(options.get("root") or DEFAULT_ROOT) / invocation.namespace
    if not (root / invocation.id).exists():
        return []
    _kill_frozen(bundle)
    cli = Cli(Path(bundle.runtime() or "runc"), root, None, bool(options.get("systemd_cgroup")))
    try:
        done = subprocess.run(
            cli.delete(invocation.id, force=True),
            cwd=bundle.path if bundle.path.is_dir() else None,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=RUNTIME_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"the OCI runtime did not delete it: {error}"]
    if done.returncode and "does not exist" not in done.stderr:
        return [f"the OCI runtime did not delete it: {done.stderr.strip()}"]
    return []


def _dead_daemons_socket(bundle: Bundle) -> Path | None:
    """Return where the container's daemon has listened, None where it does still, or where the bundle does not say."""
    try:
        address = (bundle.path / "address").read_text()
    except FileNotFoundError:
        return None
    path = Path(address.removeprefix("unix://"))
    return None if answers(path) else path


def _kill_frozen(bundle: Bundle) -> None:
    """Kill a frozen container, before it runs once more: on cgroup v1 the runtime's SIGKILL would wait for that.

    One that a checkpoint has held is continued elsewhere, by its image.
    """
    from kybernate_shim.errors import Refused
    from kybernate_shim.linux.cgroup.cgroup import Cgroup

    try:
        cgroup = Cgroup.of(pid) if (pid := bundle.init_pid_or_zero()) else _recorded(bundle)
        if cgroup is not None and cgroup.is_held:
            cgroup.kill()
    except (OSError, LookupError, ValueError, Refused):
        pass  # its processes are gone, and with them the cgroup


def _recorded(bundle: Bundle) -> Cgroup | None:
    """Return the cgroup that the daemon has recorded: the pid is in a bundle that may be gone."""
    from kybernate_shim.linux.cgroup.cgroup import Cgroup

    record = bundle.cleanup_record()
    return Cgroup.at(Path(record.cgroup)) if record is not None and record.cgroup else None


def answer(pid: int, now_ns: int) -> bytes:
    """Return a serialised DeleteResponse: the pid (-1 as uint32 when it is unknown), killed, now.

    Written by hand, because importing protobuf would take most of the time that `delete` has.
    """
    seconds, nanos = divmod(now_ns, 10**9)
    time_field = b"\x08" + varint(seconds) + b"\x10" + varint(nanos)
    return (
        b"\x08" + varint(pid or 2**32 - 1) + b"\x10" + varint(KILLED) + b"\x1a" + varint(len(time_field)) + time_field
    )


def varint(value: int) -> bytes:
    """Return protobuf's base-128 form of a non-negative number."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
