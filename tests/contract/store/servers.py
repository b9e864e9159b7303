"""S3 servers that were not written for this project, each a process on a port of the loopback.

rclone is in every root. MinIO is in the lane of the store's tests, wherever it can be built; where it cannot, moto is
tried in its place, which knows S3's rules and serves no users. SeaweedFS and Versity's gateway are there where
KYBERNATE_LAB_PROGRAMS names them. A test that asks for `here()` runs over each of those that are there.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BUCKET = "images"
ACCESS, SECRET = "access", "a-secret-of-the-tests"
START_SECONDS = 60.0
OPTIONS = {"access_key_id": ACCESS, "secret_access_key": SECRET}
ADDRESS = "127.0.0.1"


@dataclass
class Server:
    """A server that can be killed and started again with what it holds."""

    argv: list[str]
    port: int
    directory: Path
    environment: dict[str, str] = field(default_factory=dict)
    tls: bool = False
    _process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"https://localhost:{self.port}" if self.tls else f"http://{ADDRESS}:{self.port}"

    def start(self) -> None:
        log = (self.directory / "server.log").open("ab")
        self._process = subprocess.Popen(self.argv, stdout=log, stderr=log, env=os.environ | self.environment)
        self.until(self._answers)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition. Fails with the server's last words when it has ended, or after a minute."""
        end = time.monotonic() + START_SECONDS
        while not holds():
            said = (self.directory / "server.log").read_text(errors="replace")[-2000:]
            assert self._process is not None
            assert self._process.poll() is None, said
            assert time.monotonic() < end, said
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def client(self, ca: Path | None = None, **credentials: str) -> Any:
        """Return boto3's client, for what the store itself never asks of a server."""
        return client_of("s3", self.endpoint, ca, **credentials)

    def _answers(self) -> bool:
        with socket.socket() as connection:
            return connection.connect_ex((ADDRESS, self.port)) == 0


def client_of(service: str, endpoint: str, ca: Path | None = None, **credentials: str) -> Any:
    import boto3
    from botocore.config import Config

    words = {"aws_access_key_id": ACCESS, "aws_secret_access_key": SECRET} | credentials
    once = Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"})
    return boto3.client(
        service, endpoint_url=endpoint, region_name="us-east-1", verify=str(ca) if ca else None, config=once, **words
    )


@contextmanager
def _running(server: Server, *, ca: Path | None = None) -> Iterator[Server]:
    """Run a server, and make the bucket where it has none."""
    server.start()
    try:
        server.until(lambda: _has_bucket(server, ca))
        yield server
    finally:
        server.kill()


def _has_bucket(server: Server, ca: Path | None) -> bool:
    """Return whether the bucket is there and writable, after it was made; servers listen before they can do that."""
    from botocore.exceptions import BotoCoreError, ClientError

    client = server.client(ca)
    try:
        if BUCKET not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
            client.create_bucket(Bucket=BUCKET)
        client.put_object(Bucket=BUCKET, Key="begun", Body=b"")
        client.delete_object(Bucket=BUCKET, Key="begun")
    except (BotoCoreError, ClientError):
        return False
    return True


@contextmanager
def rclone(directory: Path, certificate: tuple[Path, Path] | None = None) -> Iterator[Server]:
    """`rclone serve s3` over a directory; `certificate` is that of TLS, and its key."""
    (directory / "data" / BUCKET).mkdir(parents=True)
    port = free_port()
    argv = [str(Path(sys.executable).with_name("rclone")), "serve", "s3", "--addr", f"{ADDRESS}:{port}"]
    argv += ["--auth-key", f"{ACCESS},{SECRET}"]
    if certificate:
        argv += ["--cert", str(certificate[0]), "--key", str(certificate[1])]
    data = str(directory / "data")
    server = Server([*argv, data], port, directory, {"RCLONE_CONFIG": "/dev/null"}, tls=certificate is not None)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def moto(directory: Path) -> Iterator[Server]:
    """moto's server, which holds all in memory, and knows S3's rules of parts and conditions."""
    port = free_port()
    argv = [sys.executable, "-m", "moto.server", "-H", ADDRESS, "-p", str(port)]
    with _running(Server(argv, port, directory)) as server:
        yield server


@contextmanager
def minio(directory: Path, certificate: tuple[Path, Path] | None = None, ca: Path | None = None) -> Iterator[Server]:
    """MinIO over one directory; `certificate` is that of TLS, and its key, and `ca` who has signed it."""
    certificates = directory / "certificates"
    certificates.mkdir(parents=True)
    if certificate:
        shutil.copy(certificate[0], certificates / "public.crt")
        shutil.copy(certificate[1], certificates / "private.key")
    port = free_port()
    argv = ["minio", "server", "--quiet", "--address", f"{ADDRESS}:{port}", "--certs-dir", str(certificates)]
    # Without the last it refuses a directory on the disk of the root.
    environment = {"MINIO_ROOT_USER": ACCESS, "MINIO_ROOT_PASSWORD": SECRET, "MINIO_BROWSER": "off", "MINIO_CI_CD": "1"}
    argv.append(str(directory / "data"))
    server = Server(argv, port, directory, environment, tls=certificate is not None)
    with _running(server, ca=ca) as found:
        yield found


@contextmanager
def seaweedfs(directory: Path) -> Iterator[Server]:
    """SeaweedFS: master, volume server, filer and gateway in one process."""
    data, identities = directory / "data", directory / "identities.json"
    data.mkdir(parents=True)
    credentials = [{"accessKey": ACCESS, "secretKey": SECRET}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identities.write_text(
        json.dumps({"identities": [{"name": "tests", "credentials": credentials, "actions": actions}]})
    )
    port = free_port()
    argv = ["weed", "server", f"-ip={ADDRESS}", f"-dir={data}", "-s3", f"-s3.port={port}", f"-s3.config={identities}"]
    argv += ["-volume.max=64", "-master.volumeSizeLimitMB=256", f"-s3.port.grpc={free_port()}"]
    for part in ("master", "volume", "filer"):
        argv += [f"-{part}.port={free_port()}", f"-{part}.port.grpc={free_port()}"]
    with _running(Server(argv, port, directory)) as server:
        yield server


@contextmanager
def versity(directory: Path) -> Iterator[Server]:
    """Versity's gateway over a directory; what a filesystem may not have room for is in a directory next to it."""
    for name in ("data", "sidecar", "versions"):
        (directory / name).mkdir(parents=True)
    port = free_port()
    argv = ["versitygw", "--port", f"{ADDRESS}:{port}", "--access", ACCESS, "--secret", SECRET, "posix"]
    argv += ["--sidecar", str(directory / "sidecar"), "--versioning-dir", str(directory / "versions")]
    with _running(Server([*argv, str(directory / "data")], port, directory)) as server:
        yield server


Starts = Callable[[Path], AbstractContextManager[Server]]
SERVERS: dict[str, Starts] = {
    "rclone": rclone, "minio": minio, "seaweedfs": seaweedfs, "versity": versity, "moto": moto,
}  # fmt: skip
PROGRAMS = {"minio": "minio", "seaweedfs": "weed", "versity": "versitygw"}  # that a lane has or has not


def here(*without: str) -> Sequence[str]:
    """Return the servers that can be started here."""
    built = [name for name, program in PROGRAMS.items() if shutil.which(program)]
    found = ["rclone", *built, *([] if "minio" in built else ["moto"])]
    return [name for name in found if name not in without]


def usual(directory: Path) -> AbstractContextManager[Server]:
    """Run one server, for tests that are not about servers: MinIO, or rclone where that is not there."""
    return SERVERS["minio" if "minio" in here() else "rclone"](directory)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        port: int = probe.getsockname()[1]
        return port
