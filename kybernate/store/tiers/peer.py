"""The images of another node: its agent describes them, and gives their bytes over the same port, by mutual TLS.

An image is read in parts of equal size, over several connections in parallel. After a broken connection a part is asked
for again, also from an agent that was started again meanwhile. What the other agent says of an image counts only as far
as the manifest covers it, which a key of this node must have signed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from kybernate.client.errors import AgentRefused, translated
from kybernate.client.requests import Pages
from kybernate.client.target import Endpoint
from kybernate.messages import agent_pb2, peer_pb2
from kybernate.messages.agent_pb2_grpc import CheckpointsStub
from kybernate.messages.peer_pb2_grpc import PeersStub
from kybernate.node.failure import NoImage, Refused
from kybernate.node.trusted import known_keys, ring_of, signature_of, weak_files
from kybernate.store.reader import Sink
from kybernate.store.tiers.peer_connection import PeerConnection, PeerFailed
from kybernate.store.tiers.peer_reading import Reading
from kybernate.store.tiers.tier import Have, Held, Ref, Room, Source
from kybernate.store.transfer import Transfer
from kybernate_shim.checkpoint.image.locate import NAME, NAMESPACE
from kybernate_shim.checkpoint.image.manifest import Manifest, ManifestInvalid, decode
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.config import Config

CALL_SECONDS: Final = 30.0
HIDDEN: Final = "."  # begins names that this node gives to what is not whole
ANY: Final = Ref("", "", "")


PEER_IMAGE_REFUSED_ADVICE: Final = (
    "let the nodes share a key (`shared_key` of shim.toml), or use `kybernate export` and `kybernate import`"
)


@dataclass(frozen=True)
class PeerTier:
    """The images of the node `node`, whose agent is at `target`. `config` says which keys sign images here."""

    node: str
    target: Endpoint
    config: Config
    level: int = 3
    durable: bool = True

    @property
    def name(self) -> str:
        return f"peer {self.node}"

    async def images(self) -> AsyncIterator[Held]:
        async with self.target.aio_channel() as channel:
            stub, pages = CheckpointsStub(channel), Pages(0, {})
            while (request := pages.next_request()) is not None:
                with translated(self.target.address):
                    answer = await stub.ListImages(request, timeout=CALL_SECONDS)
                for image in pages.take(answer):
                    if (held := self._held(image)) is not None:
                        yield held

    async def find(self, ref: Ref) -> Held:
        async with self.target.aio_channel() as channel:
            request = agent_pb2.GetImageRequest(image=_name_of(ref))
            with _found_at(self.target):
                image = await CheckpointsStub(channel).GetImage(request, timeout=CALL_SECONDS)
        held = self._held(image)
        if held is None:
            raise NoImage(f"tier {self.name} has no image {ref}: it is not whole there")
        return held

    async def open(self, ref: Ref) -> Source:
        """Open an image. Raises NoImage, PeerFailed, AgentUnreachable and AgentRefused."""
        return await self.open_named(_name_of(ref), ref)

    async def open_named(self, name: str, wanted: Ref = ANY) -> PeerSource:
        """Open what the other agent knows by a name: an id, a name or NAMESPACE/NAME. Raises as `open`."""
        channel = self.target.aio_channel()
        try:
            opened = await open_image(channel, self.target, name)
            try:
                return _source(channel, self, wanted, opened)
            except BaseException:
                await close_image(channel, opened.token)
                raise
        except BaseException:
            await channel.close()
            raise

    async def receive(self, source: Source, transfer: Transfer) -> Held:
        raise Refused(f"images of node {self.node} are written by its own agent", state="nothing was sent")

    async def discard(self, ref: Ref) -> None:
        """Do nothing: nothing was written there."""

    async def verify(self, ref: Ref) -> None:
        """Look whether the node has a whole copy, as its registry has it; none of it is read."""
        await self.find(ref)

    async def remove(self, ref: Ref) -> None:
        raise Refused(f"images of node {self.node} are removed by its own agent", state="nothing was removed")

    async def room(self) -> Room:
        return Room()

    def _held(self, image: agent_pb2.Image) -> Held | None:
        """Return what the node has of an image, None where it has no whole copy."""
        here = [one for one in image.replicas if one.node == self.node and one.state == agent_pb2.COMPLETE]
        if not here or not _is_plain(image.source.namespace, image.name):
            return None
        ref = Ref(image.source.namespace, image.name, image.id)
        return Held(ref, image.bytes, f"{self.target.address}{here[0].place}")


@dataclass
class PeerSource:
    """An image of another node that is open there. `token` changes when it is opened again."""

    ref: Ref
    manifest: bytes
    decoded: Manifest
    holes: tuple[tuple[tuple[int, int], ...], ...]
    token: str
    _channel: grpc.aio.Channel
    _tier: PeerTier
    directory: Path | None = None

    async def pour(self, sink: Sink, transfer: Transfer, have: Have) -> None:
        """Raises PeerFailed, also after some time without an answer; see Source."""
        await Reading(self, sink, transfer, have, self._connection).run()

    async def again(self, token: str) -> None:
        """Open the image again, unless that was done since `token`. Raises AgentUnreachable and PeerFailed."""
        if token != self.token:
            return
        opened = await open_image(self._channel, self._tier.target, self.ref.id)
        if opened.manifest != self.manifest:
            await close_image(self._channel, opened.token)
            raise PeerFailed(
                f"node {self._tier.node} has another image {self.ref.id} than before", advice=PEER_IMAGE_REFUSED_ADVICE
            )
        self.token = opened.token

    async def close(self) -> None:
        await close_image(self._channel, self.token)
        await self._channel.close()

    def _connection(self) -> PeerConnection:
        return PeerConnection(self._tier.target)


async def open_image(channel: grpc.aio.Channel, target: Endpoint, name: str) -> peer_pb2.OpenedImage:
    """Open an image by its name. Raises NoImage, AgentUnreachable and AgentRefused."""
    request = peer_pb2.OpenImageRequest(image=name)
    with _found_at(target):
        return await PeersStub(channel).OpenImage(request, timeout=CALL_SECONDS)


@contextmanager
def _found_at(target: Endpoint) -> Iterator[None]:
    """Raises NoImage where the agent does not know an image, AgentUnreachable and AgentRefused."""
    try:
        with translated(target.address):
            yield
    except AgentRefused as error:
        if error.code == grpc.StatusCode.NOT_FOUND.name:
            raise NoImage(f"{target.address}: {error}") from error
        raise


async def close_image(channel: grpc.aio.Channel, token: str) -> None:
    """Close an image. Where the agent does not answer, it closes by itself."""
    try:
        await PeersStub(channel).CloseImage(peer_pb2.CloseImageRequest(token=token), timeout=CALL_SECONDS)
    except grpc.RpcError:
        pass


def _source(channel: grpc.aio.Channel, tier: PeerTier, wanted: Ref, opened: peer_pb2.OpenedImage) -> PeerSource:
    """Return the source of an image that may be taken over. Raises PeerFailed."""
    who = f"node {tier.node}"
    try:
        manifest = decode(opened.manifest)
    except (ManifestInvalid, RecursionError) as error:
        raise PeerFailed(f"{who}: {error}", state="nothing was read", advice=PEER_IMAGE_REFUSED_ADVICE) from error
    ref = Ref(manifest.source.namespace, wanted.name or opened.name, manifest.id)
    if (wanted.id and wanted.id != ref.id) or (wanted.namespace and wanted.namespace != ref.namespace):
        raise PeerFailed(
            f"{who} has given image {ref.id} of namespace {ref.namespace!r} in place of {wanted}",
            advice=PEER_IMAGE_REFUSED_ADVICE,
        )
    if not _is_plain(ref.namespace, ref.name):
        raise PeerFailed(
            f"{who}: {str(ref)[:300]!r} is not the name of an image",
            state="nothing was read",
            advice=PEER_IMAGE_REFUSED_ADVICE,
        )
    if odd := [file.name for file in manifest.stored_files if file.name.startswith(HIDDEN)]:
        raise PeerFailed(
            f"{who}: {odd[0]!r} is not the name of an image's file",
            state="nothing was read",
            advice=PEER_IMAGE_REFUSED_ADVICE,
        )
    require_signed(Image(Path(ref.path), manifest, content=opened.manifest), who, tier.config)
    holes = tuple(tuple((one.offset, one.size) for one in file.holes) for file in opened.files)
    return PeerSource(ref, opened.manifest, manifest, holes, opened.token, channel, tier)


def require_signed(image: Image, who: str, config: Config) -> None:
    """Require a valid signature, and digests that hold against a forger: other hands have the files.

    Raises PeerFailed.
    """
    signed = signature_of(image, ring_of(known_keys(config)))
    if signed.key is None:
        raise PeerFailed(f"{who}: {signed.reason}", state="nothing was read", advice=PEER_IMAGE_REFUSED_ADVICE)
    if weak := weak_files(image.manifest):
        raise PeerFailed(
            f"{who}: {len(weak)} files of the image, {weak[0]} among them, have digests that detect damage but not"
            " forgery",
            state="nothing was read",
            advice=PEER_IMAGE_REFUSED_ADVICE,
        )


def _is_plain(namespace: str, name: str) -> bool:
    return bool(NAME.fullmatch(name)) and (not namespace or bool(NAMESPACE.fullmatch(namespace)))


def _name_of(ref: Ref) -> str:
    return ref.id or ref.path
