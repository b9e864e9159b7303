"""A node on a machine with GPUs: containerd with our shim from a kit, and an image whose content is the machine's own.

The machine needs root, the driver, a C compiler, a `python3` with torch and cuda-bindings, and no network.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from kybernate_shim import launcher
from kybernate_shim.native import CLIENT, PACKAGE, PRODUCTS, build
from tests.lab import criu_limits, oci

CHECKOUT = Path(__file__).resolve().parents[2]
IMAGE = "localhost:5000/machine:latest"
START_SECONDS = 30
END_SECONDS = 30
# Directories of the machine that a container sees, where they exist; what leads to them by links is in the image.
SHARED = ("/usr", "/opt", "/etc", "/root")
LINKS = ("bin", "sbin", "lib", "lib64")
DRIVER = Path("/usr/local/nvidia")

CONFIG = """version = 2
root = "{root}/var"
state = "{root}/run"
{disabled}[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{root}/opt"
"""
WITHOUT_CRI = 'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n'


class NotStarted(Exception):
    """containerd did not come up; shows the end of its log."""


@dataclass
class Machine:
    """A running node. `root` holds everything that belongs to it, on a filesystem that overlays may lie on."""

    root: Path
    environment: dict[str, str]
    containerd: subprocess.Popen[bytes]
    runtime: str = "runc"

    @classmethod
    def start(cls, root: Path, kit: Path, runtime: str = "runc", cri: str = "") -> Machine:
        """Unpack the kit, start containerd and import the image. Raises NotStarted.

        With the `runtime` "nvidia", the shim chooses NVIDIA's for containers that ask for GPUs. `cri` is the
        configuration of containerd's CRI; without one it is off.
        """
        root.mkdir(parents=True, exist_ok=True)
        environment = _unpack(root, kit)
        (root / "config.toml").write_text(CONFIG.format(root=root, disabled="" if cri else WITHOUT_CRI) + cri)
        Path("/etc/criu").mkdir(exist_ok=True)
        # Connections stay inside a container, whose processes are all frozen: no process can write to them meanwhile.
        Path("/etc/criu/runc.conf").write_text("network-lock skip\n")
        machine = cls(root, environment, _containerd(root, environment), runtime)
        machine.configure()
        machine.await_containerd()
        machine.import_image("machine", _layer(), Env=["PATH=/usr/bin:/bin"], Cmd=["sh"])
        return machine

    def import_image(self, name: str, layer: bytes, namespace: str = "default", **settings: list[str]) -> None:
        """Give containerd an image of one layer, as localhost:5000/NAME:latest."""
        archive = self.root / f"{name}.tar"
        oci.write_archive(oci.image(name, layer, **settings), archive)
        self("ctr", "--namespace", namespace, "images", "import", str(archive))

    def start_containerd(self) -> None:
        """Start it again, after it has ended. Raises NotStarted."""
        self.containerd = _containerd(self.root, self.environment)
        self.await_containerd()

    def __call__(self, *argv: str, status: int | None = 0, seconds: float = 300) -> str:
        """Run a program of the node and return its stdout; AssertionError with both outputs for another status."""
        done = subprocess.run(
            argv,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        said = f"{' '.join(argv)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert status is None or done.returncode == status, said
        return done.stdout if status in (0, None) else done.stdout + done.stderr

    def configure(self, more: str = "") -> None:
        """Write the shim's settings: the runtime, and `more`."""
        chosen = 'runtime = "runc"\n' if self.runtime == "runc" else ""  # the devices are given one by one then
        Path("/etc/kybernate").mkdir(exist_ok=True)
        Path("/etc/kybernate/shim.toml").write_text(f"{chosen}{more}")

    def stop(self) -> None:
        """End containerd and the CUDA helper; containers are gone by then."""
        self.containerd.terminate()
        self.containerd.wait(30)
        end_helper()  # it would give back, and make smaller, the arena of the next helper

    def log(self) -> str:
        return "\n".join((self.root / "containerd.log").read_text(errors="replace").splitlines()[-40:])

    def await_containerd(self) -> None:
        """Return when it answers. Raises NotStarted."""
        until = time.monotonic() + START_SECONDS
        while subprocess.run(["ctr", "version"], env=self.environment, capture_output=True, check=False).returncode:
            if self.containerd.poll() is not None or time.monotonic() > until:
                raise NotStarted(self.log())
            time.sleep(0.1)


def _containerd(root: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with (root / "containerd.log").open("ab") as log:
        return subprocess.Popen(
            ["containerd", "--config", root / "config.toml"], env=environment, stdout=log, stderr=log
        )


def gpu_nodes() -> list[str]:
    """Return the device nodes of the node's GPUs, in the order of their numbers; /dev/nvidia0 without any."""
    found = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal()]
    return [str(path) for path in sorted(found, key=lambda one: int(one.name[6:]))] or ["/dev/nvidia0"]


def end_containers() -> None:
    """Kill the node's shim daemons and all that they have started, as a reboot does."""
    found: dict[int, psutil.Process] = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        if _is_here(path, b"containerd-shim-kybernate"):
            with suppress(psutil.NoSuchProcess):
                shim = psutil.Process(int(path.parent.name))
                found |= {one.pid: one for one in (shim, *shim.children(recursive=True))}
    for process in found.values():
        with suppress(psutil.NoSuchProcess):
            process.kill()


def end_helper() -> None:
    """End the node's CUDA helper, which keeps the settings that it was started with."""
    for helper in _helpers():
        os.kill(helper, signal.SIGTERM)
    until = time.monotonic() + END_SECONDS
    while _helpers():
        assert time.monotonic() < until, "the node's CUDA helper does not end"
        time.sleep(0.1)


def _helpers() -> list[int]:
    found = Path("/proc").glob("[0-9]*/cmdline")
    return [int(path.parent.name) for path in found if _is_here(path, b"kybernate_shim.cuda_helper.helper")]


def _is_here(path: Path, word: bytes) -> bool:
    """Whether a process is of this node and has `word` in its command line: others may live in another root."""
    try:
        here = (path.parent / "ns/mnt").readlink() == Path("/proc/self/ns/mnt").readlink()
        return here and word in path.read_bytes()
    except OSError:  # it has ended
        return False


def mounts(paths: Sequence[str] = (), without: Sequence[str] = ()) -> list[str]:
    """Return ctr's flags that show the machine's directories, and `paths`, in a container; all `without` some."""
    wanted = [path for path in (*SHARED, *paths) if path not in without]
    shown = [path for path in wanted if Path(path).is_dir() and not Path(path).is_symlink()]
    return [word for path in shown for word in ("--mount", f"type=bind,src={path},dst={path},options=rbind:ro")]


def _unpack(root: Path, kit: Path) -> dict[str, str]:
    """Put programs and packages into `root` and return the environment that uses them."""
    lanes = [root / archive.name.removesuffix(".tar.xz") for archive in kit.glob("programs-*.tar.xz")]
    for lane in lanes:
        with tarfile.open(kit / f"{lane.name}.tar.xz") as tar:
            tar.extractall(lane, filter="data")
    for product in PRODUCTS:  # into the checkout, from where the shim runs
        build(product)
    programs = root / "bin"
    programs.mkdir(exist_ok=True)
    site = root / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target", site]
    subprocess.run([*pip, *sorted((kit / "wheels").glob("*.whl"))], check=True)
    for program in (program for lane in lanes for program in (lane / "libexec").iterdir()):
        bridge = criu_limits.preloaded(root / "limits_of_others.so") if program.name == "criu" else ""
        if bridge:
            print(criu_limits.SAID, flush=True)
        _script(programs / program.name, f'{bridge}LD_LIBRARY_PATH={program.parents[1]}/lib exec {program} "$@"')
    for package in (PACKAGE, PACKAGE.with_name("kybernate")):  # as an installation has it: next to all that it needs
        (site / package.name).symlink_to(package)
    shim = programs / launcher.NAME
    shim.write_bytes(launcher.program(sys.executable, site, CLIENT.of()))
    shim.chmod(0o755)
    _script(
        programs / "kybernate",
        f'exec {sys.executable} -c "import sys; from kybernate.cli import main; sys.exit(main())" "$@"',
    )
    libraries = [str(path) for path in (DRIVER / "lib64", DRIVER / "lib") if path.is_dir()]
    before = os.environ.get("LD_LIBRARY_PATH", "")
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": f"{site}:{CHECKOUT}",
        "LD_LIBRARY_PATH": ":".join(filter(None, [before, *libraries])),
        "CONTAINERD_ADDRESS": "/run/containerd/containerd.sock",
    }


def _script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def _layer() -> bytes:
    """Return the image's only layer: mount points, and the machine's links at the top, such as lib -> usr/lib."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in ("dev", "proc", "sys", "run", "tmp", "var", *(path.lstrip("/") for path in SHARED)):
            oci.add(tar, name, type=tarfile.DIRTYPE, mode=0o1777 if name == "tmp" else 0o755)
        for name in LINKS:
            if Path("/", name).is_symlink():
                oci.add(tar, name, type=tarfile.SYMTYPE, linkname=str(Path("/", name).readlink()))
    return content.getvalue()


def filesystem_for_overlays() -> Path:
    """Return a directory where containerd can keep its snapshots: the root filesystem may itself be an overlay."""
    for place in (Path("/var/lib"), Path("/mnt"), Path("/dev/shm")):
        kind = subprocess.run(["stat", "-f", "-c", "%T", place], capture_output=True, text=True, check=False).stdout
        if place.is_dir() and kind.strip() not in ("overlayfs", ""):
            return place / "kybernate-gpu"
    return Path("/run/kybernate-gpu")


def remove(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
