"""A side of the comparison as the coordinator sees it: a process that is asked in JSON lines, and can be ended.

The package is copied out of its checkout first, so that native parts are built from its own sources, in any checkout,
read-only or not.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.gpu.machine import CHECKOUT

PACKAGES = ("kybernate_shim", "kybernate")
# Of the checkout's own machine; each side compiles its own.
COMPILED = ("__pycache__", "*.so", "client", "hold-restored")
BUILD = """
import kybernate_shim.native as native
print(*(native.build(product) for product in native.PRODUCTS), sep="\\n")
"""
PRIVATE = ("unshare", "--mount", "--propagation", "private")  # of whole containers: places of the node are the side's
END_SECONDS = 30


class SideFailed(Exception):
    """A side answered with an error, not in time, or ended; the message says which, and why."""


class NoSuchSide(Exception):
    """A directory is no checkout of this project, or its native parts cannot be built."""


@dataclass(frozen=True)
class Package:
    """One version of the project, copied into `folder`, with its native parts built. `name` is "old" or "new"."""

    name: str
    folder: Path

    @classmethod
    def copied(cls, name: str, checkout: Path, folder: Path) -> Package:
        """Copy the packages of a checkout, and build what is in C. Raises NoSuchSide."""
        folder.mkdir(parents=True)
        for package in PACKAGES:
            if not (checkout / package).is_dir():
                raise NoSuchSide(f"{checkout}: no checkout of this project, it has no {package}")
            shutil.copytree(checkout / package, folder / package, ignore=shutil.ignore_patterns(*COMPILED))
        (folder / "tests").symlink_to(CHECKOUT / "tests")
        one = cls(name, folder)
        built = subprocess.run(
            [sys.executable, "-c", BUILD],
            env=one.environment,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if built.returncode:
            raise NoSuchSide(f"{checkout}: native parts cannot be built: {built.stderr[-2000:]}")
        return one

    @property
    def environment(self) -> dict[str, str]:
        """Return an environment in which Python imports this version, and the tests of this checkout."""
        path = [str(self.folder), os.environ.get("KYBERNATE_SITE", "")]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "KYBERNATE_TRACE": "1"}


class Side:
    """The running process of a side. `log` receives what it and its programs print."""

    def __init__(self, package: Package, kind: str, log: Path) -> None:
        self.name = package.name
        argv = [sys.executable, "-P", "-m", "tests.gpu.against.serve", kind, package.name]
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [*(PRIVATE if kind == "container" else ()), *argv],
                env=package.environment,
                cwd=package.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._text = b""

    def ask(self, verb: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        """Have something done within so many seconds, and return what it cost. Raises SideFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"ask": verb, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise SideFailed(f"{verb}: the process has ended") from error
        answer: dict[str, Any] = json.loads(self._line(verb, time.monotonic() + seconds, seconds))
        if "error" in answer:
            raise SideFailed(f"{verb}: {answer['error']}")
        return answer

    def _line(self, verb: str, until: float, seconds: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._text:
            left = until - time.monotonic()
            if left <= 0:
                raise SideFailed(f"{verb}: no answer after {seconds:g} s")
            if not select.select([self._process.stdout], [], [], left)[0]:
                continue
            if not (data := os.read(self._process.stdout.fileno(), 65536)):
                raise SideFailed(f"{verb}: the process ended with {self._process.wait()}")
            self._text += data
        line, _, self._text = self._text.partition(b"\n")
        return line

    def end(self) -> None:
        """End the process, which ends what it has started; whatever is left of that is killed."""
        family = _family(self._process.pid)
        with suppress(SideFailed, ValueError):
            self.ask("close", END_SECONDS)
        self._process.kill()
        self._process.communicate()
        kill(family)


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kill those that still live; a pid that was used again is told by the time of its start."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, END_SECONDS)
