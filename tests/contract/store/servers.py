"""S3 servers that were not written for this project, each a process on a port of the loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

BUCKET = "images"
ACCESS, SECRET = "access", "a-secret-of-the-tests"
START_SECONDS = 60.0
OPTIONS = {"access_key_id": ACCESS, "secret_access_key": SECRET}


@dataclass
class Server:
    """A server that can be killed and started again with what it holds."""

    argv: list[str]
    port: int
    directory: Path
    environment: dict[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        log = (self.directory / "server.log").open("ab")
        self._process = subprocess.Popen(self.argv, stdout=log, stderr=log, env=os.environ | self.environment)
        end = time.monotonic() + START_SECONDS
        while not self._answers():
            said = (self.directory / "server.log").read_text(errors="replace")[-2000:]
            assert self._process.poll() is None, said
            assert time.monotonic() < end, said
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.port)) == 0


@contextmanager
def rclone(directory: Path) -> Iterator[Server]:
    """`rclone serve s3` over a directory."""
    (directory / "data" / BUCKET).mkdir(parents=True)
    port = free_port()
    argv = [
        str(Path(sys.executable).with_name("rclone")),
        "serve",
        "s3",
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        f"{ACCESS},{SECRET}",
    ]
    server = Server([*argv, str(directory / "data")], port, directory, {"RCLONE_CONFIG": "/dev/null"})
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def moto(directory: Path) -> Iterator[Server]:
    """moto's server, which holds all in memory, and knows S3's rules of parts and conditions."""
    port = free_port()
    server = Server([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port, directory)
    server.start()
    try:
        request = urllib.request.Request(f"{server.endpoint}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=30).read()
        yield server
    finally:
        server.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
