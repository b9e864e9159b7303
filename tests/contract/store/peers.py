"""Two nodes for tests of images that move between them: an agent as a process, and what the other node has of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from kybernate.agent.peering import target_of_node
from kybernate.agent.settings import Settings
from kybernate.store.tiers.directory import DirectoryTier
from kybernate.store.tiers.peer import PeerTier
from kybernate.store.tiers.peer_connection import PeerConnection
from kybernate_shim.checkpoint.image.digests import Digester
from kybernate_shim.checkpoint.image.manifest import NAME, Manifest, decode, encode
from kybernate_shim.checkpoint.image.signature import sign
from kybernate_shim.config import Config
from kybernate_shim.linux.private_files import write_private
from kybernate_shim.trust.keys import signing_key
from tests.fakes.sized_image import write_sized_image
from tests.unit.agent.access.authority import Authority

ROOT = Path(__file__).parents[3]


@dataclass
class Server:
    """The node that has images, and its agent, which can be killed and started again."""

    place: Path
    port: int
    more: str = ""
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        (self.place / "agent.toml").write_text(
            f'node_name = "node-1"\nsocket = "{self.place}/run/agent.sock"\n[tls]\nlisten = "127.0.0.1:{self.port}"\n'
            f'certificate = "{self.place}/certificate"\nkey = "{self.place}/key"\n'
            f'client_ca = "{self.place}/client_ca"\n'
            f'peers = ["node-*"]\nreaders = ["reader-*"]\noperators = ["operator-*"]\n[peers]\n{self.more}'
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.image_agent", str(self.place)],
            stdout=subprocess.PIPE,
            stderr=(self.place / "log").open("a"),
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        assert "serves" in iter_until(first, self.process), (self.place / "log").read_text()[-3000:]

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    @property
    def images(self) -> Path:
        return self.place / "images"


def iter_until(line: str, process: subprocess.Popen[str]) -> str:
    """Return the first line that is not of the log."""
    assert process.stdout is not None
    while line and line.strip() != "serves":
        line = process.stdout.readline()
    return line


@dataclass
class Node:
    """The node that wants them. `name` is that of its certificate."""

    place: Path
    server: Server
    ca: Authority
    name: str = "node-2"
    config: Config = field(init=False)

    def __post_init__(self) -> None:
        self.config = Config(checkpoint_root=self.place / "images", key_directory=self.place / "keys")

    def certify(self, ca: Authority | None = None, name: str = "") -> Node:
        """Write this node's certificate, of another CA or with another name where one is given."""
        self.place.mkdir(exist_ok=True)
        (ca or self.ca).write(self.place, name or self.name)
        (self.place / "client_ca").write_bytes(self.ca.certificate)
        return self

    @property
    def settings(self) -> Settings:
        (self.place / "agent.toml").write_text(
            f'[tls]\ncertificate = "{self.place}/certificate"\nkey = "{self.place}/key"\n'
            f'client_ca = "{self.place}/client_ca"\n'
            f'[peers]\naddresses = {{ node-1 = "localhost:{self.server.port}" }}\n'
        )
        return Settings.load(self.place / "agent.toml")

    @property
    def peer(self) -> PeerTier:
        return PeerTier("node-1", target_of_node("node-1", self.settings), self.config)

    def connection(self) -> PeerConnection:
        return PeerConnection(target_of_node("node-1", self.settings))

    def asked(self, method: str, path: str, range: str) -> tuple[int, bytes]:
        """Return status and content of the answer to a request of any form."""
        connection = self.connection()._connected()
        try:
            connection.putrequest(method, path, skip_accept_encoding=True)
            if range:
                connection.putheader("Range", range)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    @property
    def disk(self) -> DirectoryTier:
        return DirectoryTier("disk", 2, self.place / "images", durable=False)


@contextmanager
def serving(place: Path, port: int, more: str = "") -> Iterator[Server]:
    """Run the agent of the first node until the block ends."""
    server = Server(place, port, more)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def nodes(place: Path, port: int) -> tuple[Server, Node]:
    """Make both nodes, which share a key that signs images and a CA; no agent runs yet."""
    ca = Authority()
    server = Server(place / "one", port)
    (server.place / "run").mkdir(parents=True, mode=0o755)
    ca.write(server.place, "node-1", "localhost")
    node = Node(place / "two", server, ca).certify()
    signing_key(node.config)
    (server.place / "keys").symlink_to(node.place / "keys")
    return server, node


def signed_image(node: Node, directory: Path, *, id: str = "image-1", mib: int = 9, kind: str = "blake3") -> Manifest:
    """Write an image as a node with a shared key does: strong digests, and a signature that is valid on both nodes."""
    write_sized_image(directory, id=id, mib=mib)
    manifest = decode((directory / NAME).read_bytes())
    with Digester(kind) as digester:
        files = digester.files(directory, [file.name for file in manifest.files])
    return signed_again(node, directory, replace(manifest, files=files))


def signed_again(node: Node, directory: Path, manifest: Manifest) -> Manifest:
    signed = sign(manifest, signing_key(node.config))
    write_private(directory / NAME, encode(signed))
    os.utime(directory)
    return signed
