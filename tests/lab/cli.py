"""The command line of the lab, and the outer half of a run: from an empty cache to a node, and back to nothing."""

from __future__ import annotations

import argparse
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from tests.lab import cache, cgroups, go_programs, namespaces, project, root, syscalls, wheel_programs
from tests.lab.failure import LabFailed
from tests.lab.lanes import LANES, Lane
from tests.lab.suites import Suite

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECTS_KEPT = 4
CANNOT_START = 125
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
FROM_TERMINAL = 0x80  # SI_KERNEL: the terminal has sent the signal to everything in the node's foreground as well
# Results of a run in the read-only checkout would be lost or refused: caches go elsewhere or are not kept.
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTEST_ADDOPTS": "-p no:cacheprovider",
    "HYPOTHESIS_STORAGE_DIRECTORY": "/tmp/hypothesis",
    # ctr of containerd 2.2 and newer warns on stderr, among a container's lines, that cgroup v1 is deprecated.
    "CONTAINERD_SUPPRESS_DEPRECATION_WARNINGS": "1",
    # gRPC stops its threads before a fork, and now and then waits for them forever. Tests fork only to execute.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
MOST_NODES, DEFAULT_RUNTIMES = 3, ("runc", "kybernate")
KEPT = ("TERM", "NODES", "DEFAULT_RUNTIME", "KYBERNATE_SCALE")
EPILOG = """
The first run of a lane builds its root from Debian's packages, which takes some minutes; later ones start in seconds.

environment:
  KYBERNATE_LAB_CACHE      where roots are kept (/var/cache/kybernate-lab)
  KYBERNATE_LAB_MIRROR     URI of a Debian archive (the one that this machine's apt uses)
  KYBERNATE_LAB_GO_CACHE   where Go keeps modules and objects between builds (nowhere)
  KYBERNATE_LAB_PROGRAMS   further sets of programs, such as seaweedfs,versity (none)
  KYBERNATE_LAB_LOG_LEVEL  of containerd (info)
  NODES, DEFAULT_RUNTIME   of a cluster, as --nodes and --default-runtime
  KYBERNATE_SCALE          "full": tests that have a larger form take it

in the node:
  /src                     this checkout, read-only; /src/build is writable and stays
  /opt/kybernate           the project, installed by pip, with the extra "test"
  /var/log/lab             logs of containerd and of the image registry; after a failure also in build/lab/LANE
  localhost:5000           image registry with busybox, pause and python, which containerd holds as well

in the node of a cluster:
  kubectl                  as its administrator; as a user of one namespace with --kubeconfig /etc/kubernetes/user.conf
  node-1 COMMAND…          runs a command in the cluster's node of this name, where its containerd and its agent are
"""


def main(argv: Sequence[str]) -> int:
    """Serve `tests/lab/run` and return its exit status: the command's, or 125 if there is no node to run it in."""
    arguments = parse(argv)
    if os.geteuid() != 0:
        print("the lab needs root, for namespaces, mounts and cgroups", file=sys.stderr)
        return CANNOT_START
    os.umask(0o022)
    lane = LANES[arguments.lane]
    try:
        with _layers(lane) as layers:
            os.environ.update(NODES=str(arguments.nodes), DEFAULT_RUNTIME=arguments.default_runtime)
            return (
                0
                if arguments.build_only
                else _run(lane, layers, arguments.command or ["bash"], unified=arguments.cgroup2)
            )
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except LabFailed as error:
        print(f"lab {lane.name}: {error}", file=sys.stderr)
        return CANNOT_START


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Raises SystemExit, after a message on stderr, where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="tests/lab/run",
        description="Run COMMAND as root in a throw-away node and return its exit status; a shell without COMMAND.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--build-only", action="store_true", help="build the lane's root and the project, run nothing")
    parser.add_argument(
        "--cgroup2", action="store_true", help="show the node cgroup v2 alone (without v1's controllers)"
    )
    parser.add_argument("--nodes", type=int, default=os.environ.get("NODES") or 1, help="of a cluster: 1, 2 or 3")
    parser.add_argument(
        "--default-runtime",
        default=os.environ.get("DEFAULT_RUNTIME") or DEFAULT_RUNTIMES[0],
        metavar="NAME",
        help=f"the handler of a cluster's pods that name none: {' or '.join(DEFAULT_RUNTIMES)}",
    )
    parser.add_argument("lane", choices=LANES, metavar="LANE", help=" or ".join(LANES))
    parser.add_argument("command", nargs="*", metavar="-- COMMAND", help="what to run, in /src")
    arguments = parser.parse_args(argv)
    if LANES[arguments.lane].cluster:
        if not 1 <= arguments.nodes <= MOST_NODES:
            parser.error(f"a cluster has 1 to {MOST_NODES} nodes, not {arguments.nodes}")
        if arguments.default_runtime not in DEFAULT_RUNTIMES:
            parser.error(f"a cluster has no handler {arguments.default_runtime}, but {' and '.join(DEFAULT_RUNTIMES)}")
    return arguments


@contextmanager
def _layers(lane: Lane) -> Iterator[tuple[Path, ...]]:
    """Build what the cache lacks of the lane's layers and keep them from being removed while the body runs."""
    store, suite = cache.directory(), lane.suite
    layer = store / f"{suite.name}-{root.identity(suite, CHECKOUT)}"
    projects = layer.with_name(f"{layer.name}.projects")
    built = [go_programs.hold(name) for name in (*lane.programs, *_wanted())]
    built += [*_extras(lane), *map(wheel_programs.hold, lane.wheels)]
    with cache.locked(store / f"{suite.name}.lock", f"lab {lane.name}: waits for another run that builds {suite.name}"):
        cache.discard_unfinished(store, f"{suite.name}-*")
        holders = [holder for _, holder in built]
        holders.append(cache.hold_layer(layer, lambda into: _build(suite, into)))
        cache.prune_layers(store, f"{suite.name}-????????????", keep=2)
        for orphan in store.glob(f"{suite.name}-*.projects"):
            if not orphan.with_suffix("").exists():
                shutil.rmtree(orphan)
        projects.mkdir(exist_ok=True)
        cache.discard_unfinished(projects)
        with tempfile.TemporaryDirectory(dir=projects, prefix=".staging-") as staging:
            area = Path(staging)
            installed = projects / project.stage(CHECKOUT, area)
            holders.append(cache.hold_layer(installed, lambda into: project.install(area, layer, into)))
        cache.prune_layers(projects, "????????????", keep=PROJECTS_KEPT)
    try:
        yield installed, *(programs for programs, _ in built), layer
    finally:
        for holder in holders:
            os.close(holder)


def _wanted() -> list[str]:
    """Return the sets of programs that KYBERNATE_LAB_PROGRAMS adds to any lane."""
    names = [name for name in os.environ.get("KYBERNATE_LAB_PROGRAMS", "").split(",") if name]
    if unknown := sorted(set(names) - go_programs.PROGRAMS.keys()):
        raise LabFailed(f"KYBERNATE_LAB_PROGRAMS names {unknown[0]}: there are {', '.join(go_programs.PROGRAMS)}")
    return names


def _extras(lane: Lane) -> Iterator[tuple[Path, int]]:
    """Give the layers of programs that the lane has where they can be built; say which are left out, and why."""
    for name in sorted(set(lane.extras) - set(_wanted())):
        try:
            yield go_programs.hold(name)
        except go_programs.GoUnavailable as error:
            print(f"lab {lane.name}: {name} is left out, with its tests: {error}", file=sys.stderr)


def _build(suite: Suite, into: Path) -> None:
    begin = time.monotonic()
    print(f"lab {suite.name}: builds the root in {into.parent}, once", file=sys.stderr)
    root.build(suite, CHECKOUT, into)
    print(f"lab {suite.name}: built after {time.monotonic() - begin:.0f} s", file=sys.stderr)


def _unless_gone(function: object, path: str, info: tuple[type[BaseException], BaseException, object]) -> None:
    """Let a process that ends with its node remove its own files."""
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]


def _run(lane: Lane, layers: tuple[Path, ...], command: Sequence[str], *, unified: bool) -> int:
    """Run `command` in a node made of `layers`, then remove all that belonged to the node."""
    name = f"{lane.name}-{os.getpid()}-{_start_time()}"
    scratch, lock = cache.new_run(cache.directory() / "runs", name, lambda old: cgroups.remove(old.name))
    try:
        (CHECKOUT / "build").mkdir(exist_ok=True)
        node = namespaces.Node(layers, scratch, CHECKOUT, cgroups.create(name), unified)
        return _supervise(_fork(node, [lane.name, *command]))
    finally:
        cgroups.remove(name)
        shutil.rmtree(scratch, onerror=_unless_gone)
        os.close(lock)


def _start_time() -> str:
    """Return when this process started, in clock ticks since boot: with the pid, a name that is never used twice."""
    return Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]


def _fork(node: namespaces.Node, command: Sequence[str]) -> int:
    """Start the node's first process and return its pid; signals for it stay pending until it can take them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [*SIGNALS, signal.SIGCHLD])
    parent = os.pidfd_open(os.getpid())
    syscalls.unshare(syscalls.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        _become_init(node, command, parent)
    os.close(parent)
    return pid


def _become_init(node: namespaces.Node, command: Sequence[str], parent: int) -> NoReturn:
    """Enter `node` and execute its init. Never returns into the caller's clean-up, which is the parent's to do."""
    try:
        syscalls.die_with_parent(signal.SIGKILL)
        if select.select([parent], [], [], 0)[0]:
            os._exit(CANNOT_START)  # the parent died before the line above could tell of it
        namespaces.enter(node)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        os.chdir(namespaces.CHECKOUT)
        kept = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith("KYBERNATE_LAB")}
        os.execve("/usr/bin/python3", ["python3", "-m", "tests.lab.init", *command], {**ENVIRONMENT, **kept})
    except BaseException as error:  # noqa: BLE001  # a forked process must not run on in its parent's code
        print(f"the node cannot be entered: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(CANNOT_START)


def _supervise(init: int) -> int:
    """Hand signals on to the node's first process until it ends; return its exit status."""
    while True:
        arrived = signal.sigwaitinfo([*SIGNALS, signal.SIGCHLD])
        if arrived.si_signo != signal.SIGCHLD:
            if arrived.si_code != FROM_TERMINAL:
                os.kill(init, arrived.si_signo)
            continue
        pid, status = os.waitpid(init, os.WNOHANG)
        if pid == init:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
