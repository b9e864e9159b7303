"""Containers that get their GPUs from NVIDIA's own runtime, by a specification that `nvidia-ctk` makes of the machine.

A container has the machine's /usr and /etc as an image would bring them: overlays of its own, in which hooks can
write, and in which nothing is of the machine's driver. What it computes with, the runtime has given it. Where the
machine's own root is an overlay, they are copies, of which /usr is the same for all.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.machine import DRIVER, Machine
from tests.lab.namespaces import on_overlay

CONFIG = Path("/etc/nvidia-container-runtime/config.toml")
SETTINGS = """[nvidia-container-runtime]
mode = "cdi"
log-level = "warning"
[nvidia-container-runtime.modes.cdi]
spec-dirs = ["{directory}"]
"""
SHOWN = ("/usr", "/etc")


@dataclass(frozen=True)
class Toolkit:
    """NVIDIA's container toolkit of a kit, set up on a machine. `root` has the overlays and the specification."""

    root: Path

    @classmethod
    def install(cls, machine: Machine) -> Toolkit:
        """Have `nvidia-ctk` describe the machine, and make the overlays without what it has described."""
        toolkit = cls(machine.root / "nvidia")
        specification = toolkit.root / "cdi/nvidia.json"
        specification.parent.mkdir(parents=True)
        hook = machine.root / "bin/nvidia-cdi-hook"
        machine(
            *("nvidia-ctk", "--quiet", "cdi", "generate", "--mode", "nvml", "--nvidia-cdi-hook-path", str(hook)),
            *("--output", str(specification)),
        )
        CONFIG.parent.mkdir(exist_ok=True)
        CONFIG.write_text(SETTINGS.format(directory=specification.parent))
        for path in SHOWN:
            toolkit._overlay(path)
        toolkit._hide(json.loads(specification.read_text()))
        toolkit.remove()  # what is below a container's overlay must not be mounted itself
        return toolkit

    @property
    def specification(self) -> str:
        return (self.root / "cdi/nvidia.json").read_text()

    def shown(self, path: str, container: str = "") -> Path:
        """Return the overlay of one of the machine's directories: a container's, or the one below them all."""
        return self.root / path.strip("/") / (f"of-{container}" if container else "") / "merged"

    def mounts(self, container: str) -> list[str]:
        """Return ctr's flags that show a container its own overlays, which are made.

        One that is restored from another, and has its name with a number at the end, has what that one's hooks wrote.
        """
        owner = re.sub(r"-\d+$", "", container)
        for path in SHOWN:
            self._own(path, owner)
        return [
            word
            for path in SHOWN
            for word in ("--mount", f"type=bind,src={self.shown(path, owner)},dst={path},options=rbind:rw")
        ]

    def remove(self) -> None:
        for merged in (*self.root.glob("*/merged"), *self.root.glob("*/of-*/merged")):
            if merged.is_mount():
                subprocess.run(["umount", merged], check=True)

    def _own(self, path: str, owner: str) -> None:
        """Make a container's overlay, or its copy of what is small."""
        merged, base = self.shown(path, owner), self.shown(path)
        if merged.exists() or merged.is_symlink():
            return
        if not base.with_name("upper").is_dir():
            merged.parent.mkdir(parents=True)
            if path == "/usr":
                merged.symlink_to(base)
            else:
                subprocess.run(["cp", "--archive", f"{base}/.", merged], check=True)
            return
        self._mount(merged, f"{base.with_name('upper')}:{path}")

    def _overlay(self, path: str) -> None:
        merged = self.shown(path)
        if on_overlay(Path(path)):  # CRIU does not find a mapped file that lies below two
            merged.mkdir(parents=True)
            subprocess.run(["cp", "--archive", "--one-file-system", f"{path}/.", merged], check=True)
            return
        self._mount(merged, path)

    def _mount(self, merged: Path, lower: str) -> None:
        upper, work = merged.with_name("upper"), merged.with_name("work")
        for directory in (merged, upper, work):
            directory.mkdir(parents=True)
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", merged], check=True)

    def _hide(self, specification: Any) -> None:
        """Take out of the overlays what is mounted into containers, and what leads to it."""
        mounted = specification["containerEdits"]["mounts"]
        (self.shown("/etc") / "ld.so.cache").unlink(missing_ok=True)
        paths = {Path(mount[key]).resolve() for mount in mounted for key in ("hostPath", "containerPath")}
        paths |= {Path(mount[key]) for mount in mounted for key in ("hostPath", "containerPath")}
        for path in sorted(paths):
            if (place := self._place(path)) is not None:
                place.unlink(missing_ok=True)
        if (driver := self._place(DRIVER)) is not None:
            shutil.rmtree(driver, ignore_errors=True)
        for directory in {place.parent for path in paths if ".so" in path.name and (place := self._place(path))}:
            for link in directory.glob("*.so*"):
                if link.is_symlink() and not self._leads_somewhere(link):
                    link.unlink()

    def _place(self, path: Path) -> Path | None:
        """Return where an overlay has a path of the machine, None where none has."""
        return next(
            (self.shown(shown) / path.relative_to(shown) for shown in SHOWN if path.is_relative_to(shown)), None
        )

    def _leads_somewhere(self, link: Path) -> bool:
        target = link.readlink()
        place = self._place(target) if target.is_absolute() else link.parent / target
        return place is None or place.exists() or place.is_symlink()


def by_runtime(flags: Sequence[str]) -> list[str]:
    """Return ctr's flags with the GPUs that they name by device asked for by the environment instead."""
    left, gpus = [], []
    for flag in flags:
        if found := re.fullmatch(r"/dev/nvidia(\d+)", flag):
            left.pop()  # --device
            gpus.append(found[1])
        else:
            left.append(flag)
    return [*left, "--env", f"NVIDIA_VISIBLE_DEVICES={','.join(gpus)}"] if gpus else left
