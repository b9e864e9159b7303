"""A program that serves images to other agents as the node agent does: its sockets, access, registry and services.

It knows no containers, so it needs no containerd. `python -m tests.fakes.image_agent PLACE`; PLACE has `agent.toml`,
the files that this names, and `images`. It prints a line when it serves.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from structlog import get_logger

from kybernate.agent.sending.files import ImageFiles, Pace
from kybernate.agent.sending.leases import Leases
from kybernate.agent.service.checkpoints import Checkpoints
from kybernate.agent.service.peer_images import PeerImages
from kybernate.agent.serving import Servicers, Serving
from kybernate.agent.settings import Settings
from kybernate.messages import agent_pb2_grpc as services
from kybernate.registry.artefacts import Artefacts
from kybernate.registry.catalogue import Catalogue
from kybernate_shim.config import Config


async def serve(place: Path) -> None:
    settings, log = Settings.load(place / "agent.toml"), get_logger()
    config = Config(checkpoint_root=place / "images", key_directory=place / "keys", audit_log=place / "audit.log")
    catalogue = Catalogue(f"sqlite:///{place}/registry.db", node=settings.node_name)
    catalogue.rebuild(Artefacts(config, settings.node_name))
    leases = Leases(log)
    serving = Serving(lambda: settings, lambda: config, tuple, log)
    limit = lambda: settings.peers.bytes_per_second  # noqa: E731
    await serving.start(
        Servicers(
            services.InventoryServicer(),
            services.ActivityServicer(),
            services.OperationsServicer(),
            Checkpoints(lambda: catalogue, None, print),  # type: ignore[arg-type]  # no operation is begun
            services.SeatsServicer(),
            services.SelfServicer(),
            PeerImages(lambda: catalogue, leases),
            ImageFiles(leases, settings.peers.reads, Pace(limit)),
            {},
        )
    )
    print("serves", flush=True)
    await leases.run()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
