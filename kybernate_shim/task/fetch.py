"""Asks the node's agent for images that are not on the node, for a list of them, and for a container's image digest.

containerd provides none of that to a shim. Without an agent, an image stays missing, and a container image unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from kybernate_shim.checkpoint.image.locate import NAME
from kybernate_shim.checkpoint.image.requested import Wanted
from kybernate_shim.checkpoint.image.starts import KnownImage
from kybernate_shim.errors import Refused
from kybernate_shim.messages import fetch_pb2 as wire
from kybernate_shim.run_directory import IMAGES_SOCKET
from kybernate_shim.trust.requester import Requester
from kybernate_shim.ttrpc import Client, Code, RpcError

SERVICE: Final = "kybernate.images.v1.Images"
CONNECT_SECONDS: Final = 2.0
SECONDS: Final = 60.0  # for CRIU's part of the image: clients of containerd give a Create two minutes
DESCRIBE_SECONDS: Final = 5.0  # for what containerd has in its database
RELATED_SECONDS: Final = 20.0  # for the registry, which may be another machine's database
UNKNOWN: Final = (Code.NOT_FOUND, Code.UNIMPLEMENTED)


class ImageNotFetched(Refused):
    """The node's agent did not fetch the image, or not in time. The message says why."""


async def fetch(wanted: Wanted, requester: Requester, container: str) -> bool:
    """Have the agent fetch an image, and return whether its restore may begin now.

    False where no agent runs, or none of its tiers has the image. Raises ImageNotFetched.
    """
    if not NAME.fullmatch(wanted.name):
        return False
    try:
        agent = await Client.connect(str(IMAGES_SOCKET), timeout=CONNECT_SECONDS)
    except OSError:
        return False
    try:
        return await _asked(agent, wanted, wire.FetchRequest(namespace=requester.namespace, name=wanted.name,
                                                             container=container))  # fmt: skip
    finally:
        await agent.close()


async def related(requester: Requester, name: str, words: Sequence[str]) -> tuple[KnownImage, ...]:
    """Return the images of the requester's namespace that `fetch` can have brought, by what they come from.

    These are images of a pod, a pod's uid or an origin among `words`, and those with the origin of the image called
    `name`. Without an agent there are none. Raises ImageNotFetched where it does not answer.
    """
    try:
        agent = await Client.connect(str(IMAGES_SOCKET), timeout=CONNECT_SECONDS)
    except OSError:
        return ()
    try:
        request = wire.RelatedRequest(namespace=requester.namespace, name=name, words=[word for word in words if word])
        found = await agent.call(SERVICE, "Related", request, wire.RelatedResponse, timeout=RELATED_SECONDS)
    except (RpcError, TimeoutError, ConnectionError) as error:
        if isinstance(error, RpcError) and error.code in UNKNOWN:
            return ()  # of an older release
        raise ImageNotFetched(
            "the node's agent does not report which images of the container other nodes and the object store have:"
            f" {error or 'it has not answered in time'}. Nothing was restored; name the image, or try again"
        ) from error
    finally:
        await agent.close()
    return tuple(map(_known, found.images))


def _known(image: wire.RelatedImage) -> KnownImage:
    return KnownImage(
        image.name,
        image.id,
        datetime.fromisoformat(image.time),
        image.container,
        image.container_name,
        image.pod,
        image.pod_uid,
        image.origin,
        image.parent,
    )


async def container_image(namespace: str, container: str) -> str:
    """Return the digest of the image of a container, "" where it is not known, or no agent runs."""
    try:
        agent = await Client.connect(str(IMAGES_SOCKET), timeout=CONNECT_SECONDS)
    except OSError:
        return ""
    try:
        request = wire.DescribeRequest(namespace=namespace, container=container)
        found = await agent.call(SERVICE, "Describe", request, wire.DescribeResponse, timeout=DESCRIBE_SECONDS)
    except (RpcError, TimeoutError, ConnectionError):
        return ""
    finally:
        await agent.close()
    return found.digest


async def _asked(agent: Client, wanted: Wanted, request: wire.FetchRequest) -> bool:
    try:
        await agent.call(SERVICE, "Fetch", request, wire.FetchResponse, timeout=SECONDS)
    except RpcError as error:
        if error.code in UNKNOWN:
            return False
        if error.code == Code.DEADLINE_EXCEEDED:
            raise _late(wanted) from error
        raise ImageNotFetched(f"{wanted.by}: the node's agent: {error.message}. Nothing was restored") from error
    except TimeoutError:
        raise _late(wanted) from None
    except ConnectionError as error:
        raise ImageNotFetched(
            f"{wanted.by}: the node's agent ended while it was fetching {wanted.name}. Nothing was restored"
        ) from error
    return True


def _late(wanted: Wanted) -> ImageNotFetched:
    return ImageNotFetched(
        f"{wanted.by}: within {SECONDS:g} s, the node's agent has not fetched the part of {wanted.name} that a restore"
        " begins with; it continues. Nothing was restored"
    )
